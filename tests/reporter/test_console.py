"""Rich's tables, texts and bars, of values that hold escape sequences and markup."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainspec_cli.core.printable import PrintableStream, is_printable
from trainspec_cli.reporter.console import PrintableConsole, open_run_log
from trainspec_cli.reporter.live import PlainScreen, TerminalScreen
from trainspec_cli.run.folder.paths import RunDir

OWN_STYLES = re.compile(r"\x1b\[[0-9;]*m")
CURSOR = re.compile(r"\x1b\[(\?25[lh]|[12]?K|\d*A)|\r")
HOSTILE = "\x1b]0;owned\x07\x1b[8mhidden [red]marked[/red] :smile: \x9b2J\u202e \\[x]"
SHOWN = "\\x1b]0;owned"
MARKUP = "[red]marked[/red] :smile:"


def in_a_table(text: str) -> Table:
    table = Table("head")
    table.add_row(text)
    table.add_row(Text(text, style="bold"))
    return table


RENDERABLES: dict[str, Callable[[str], RenderableType]] = {
    "text": lambda text: text,
    "styled": lambda text: Text(text, style="bold"),
    "table": in_a_table,
    "padded": lambda text: Group(Padding(Text(text), 2), in_a_table(text)),
}


def render(value: RenderableType) -> str:
    output = io.StringIO()
    PrintableConsole(file=output, force_terminal=True, color_system="truecolor", width=400).print(value)
    return output.getvalue()


@pytest.mark.parametrize("kind", RENDERABLES)
def test_only_richs_own_styles_reach_the_terminal(kind: str) -> None:
    shown = OWN_STYLES.sub("", render(RENDERABLES[kind](HOSTILE)))
    assert is_printable(shown)
    assert SHOWN in shown and "\\x1b[8mhidden" in shown
    assert MARKUP in shown


@pytest.mark.parametrize("kind", RENDERABLES)
@settings(deadline=None, max_examples=50)
@given(text=st.text(st.sampled_from("a [red]/\x1b[0m\x9b\u202e\n\t") | st.characters(codec="utf-8"), max_size=30))
def test_whatever_the_text_is(kind: str, text: str) -> None:
    assert is_printable(OWN_STYLES.sub("", render(RENDERABLES[kind](text))))


@pytest.mark.parametrize("screen", [TerminalScreen, lambda console: PlainScreen(console, 1)])
def test_the_live_view_escapes_what_is_told(screen: Callable[[PrintableConsole], TerminalScreen]) -> None:
    output = io.StringIO()
    view = screen(PrintableConsole(file=output, force_terminal=True, width=400))
    view.show_message(HOSTILE)
    view.close()
    shown = CURSOR.sub("", OWN_STYLES.sub("", output.getvalue()))
    assert is_printable(shown)
    assert SHOWN in shown and MARKUP in shown


def test_styles_pass_through_a_safe_standard_output(monkeypatch: pytest.MonkeyPatch) -> None:
    output = io.StringIO()
    monkeypatch.setattr("sys.stdout", PrintableStream(output))
    PrintableConsole(force_terminal=True, color_system="standard").print(Text("a\x1b[2J", style="red"))
    assert output.getvalue() == "\x1b[31ma\\x1b[2J\x1b[0m\n"


def test_a_console_that_writes_to_the_log_has_no_second_copy(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    with open_run_log(run, Console(file=io.StringIO())) as log:
        assert log is not None
        log.print("first")
    with run.run_log.open("a") as file, open_run_log(run, Console(file=file)) as log:
        assert log is None
    assert run.run_log.read_text() == "first\n"


def test_a_full_disk_ends_the_log_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.logs.mkdir(parents=True)
    run.run_log.symlink_to("/dev/full")
    with open_run_log(run, Console(file=io.StringIO())) as log:
        assert log is not None
        log.print("a line")
        log.print("another")
