from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli import __version__
from trainspec_cli.cli import main
from trainspec_cli.core.errors import EXIT_CODES, Interrupted, MachineError, RecipeError, Stopped
from trainspec_cli.core.printable import Style
from trainspec_cli.session.launching.sweep import read_sweep


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_help_names_every_command_and_exit_code(capsys, arguments: list[str]) -> None:
    assert main.run(arguments) == 0
    text = capsys.readouterr().out
    headings = [text.index(f"\n\n{group}\n  ") for group in main.GROUPS]
    assert headings == sorted(headings)
    for name, command in main.COMMANDS.items():
        assert name in text
        assert command.summary in text
    for code, meaning in EXIT_CODES.items():
        assert f"{code}  {meaning}" in text


def test_version(capsys) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"trainspec {__version__}\n"


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_every_command_explains_itself(capsys, name: str) -> None:
    assert main.run([name, "--help"]) == 0
    assert f"trainspec {name}" in capsys.readouterr().out


@pytest.mark.parametrize("name", list(main.COMMANDS))
def test_a_person_can_read_the_options_of_each_command(name: str) -> None:
    command = main.load_command(name)
    for each in (command, *getattr(command, "commands", {}).values()):
        options = [parameter.opts for parameter in each.params if parameter.opts[0].startswith("-")]
        assert len(options) <= 12, f"{name} {each.name}"


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["lanch"], "command `lanch`", "trainspec launch?"),
        (["--verbose"], "option `--verbose`", "commands: launch"),
        (["recipe=tiny", "a=1"], "command comes first", "launch recipe=tiny a=1"),
        (["validate", "--jsn", "recipe=tiny"], "option: --jsn", "--json?"),
        (["recipes"], "command `recipes`", "trainspec list recipe?"),
        (["launch", "--webhook", "http://a"], "option: --webhook", "--notify URL"),
        (["sbatch", "--site", "0"], "option: --site", "resilience.sites.site=I"),
        (["validate", "--recipe", "tiny"], "option: --recipe", "without dashes: recipe="),
        (["show", "--optim.lr=3"], "option: --optim.lr", "without dashes: optim.lr="),
        (["validate"], "'recipe=NAME|key=value'.", "validate recipe=quickstart"),
        (["data", "prepar"], "command 'prepar'", "data --help"),
    ],
)
def test_errors_of_usage(capsys, arguments: list[str], message: str, hint: str) -> None:
    assert main.run(arguments) == 2
    captured = capsys.readouterr()
    first, *others = captured.err.splitlines()
    assert first.startswith("error: ") and message in first
    assert others[-1].startswith("  hint: ") and hint in others[-1]
    assert captured.out == ""


def test_a_command_of_commands_shows_them(capsys) -> None:
    assert main.run(["data"]) == 2
    captured = capsys.readouterr()
    assert "prepare" in captured.out
    assert captured.err.startswith("error: ") and captured.err.endswith("trainspec data --help\n")


@pytest.mark.clause("LAUNCH-10")
def test_errors_of_usage_as_json(capsys) -> None:
    assert main.run(["validate", "--json", "--nonsense"]) == 2
    captured = capsys.readouterr()
    (error,) = json.loads(captured.out)["errors"]
    assert (error["code"], captured.err) == ("usage", "") and "--nonsense" in error["message"]


@pytest.mark.clause("LAUNCH-2")
@pytest.mark.parametrize(
    ("raised", "code", "text"),
    [
        (MachineError("no disk", hint="buy"), 4, "error: no disk\n  hint: buy\n"),
        (Stopped("stopped at step 3"), 6, "stopped: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(capsys, monkeypatch, raised: BaseException, code: int, text: str) -> None:
    def fail(*_: object) -> int:
        raise raised

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == code
    assert capsys.readouterr().err == text


@pytest.mark.parametrize("code", [0, 4, 5])
def test_what_a_command_returns_is_the_exit_code(monkeypatch, code: int) -> None:
    monkeypatch.setattr("trainspec_cli.session.launching.session.launch", lambda *_, **__: code)
    assert main.run(["launch", "recipe=tiny"]) == code


@pytest.mark.parametrize("command", ["launch", "resume"])
def test_a_request_to_stop_interrupts_what_comes_before_the_workers(monkeypatch, command: str) -> None:
    """Without a handler, SIGTERM ends the process immediately and leaves its children and half-written files."""

    def begin(*_: object, **__: object) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    module = {"launch": "session", "resume": "resume"}[command]
    monkeypatch.setattr(f"trainspec_cli.session.launching.{module}.{command}", begin)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        signal.signal(signal.SIGTERM, lambda *_: None)
        assert main.run([command, "recipe=tiny" if command == "launch" else "runs/one"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_fault_of_the_program_leaves_its_traceback_in_a_file(capsys, monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == 1
    summary, place = capsys.readouterr().err.splitlines()
    assert summary.endswith(" bug: ZeroDivisionError: oh")
    file = Path(place.removeprefix("the traceback is in "))
    assert "in fail" in file.read_text()
    file.unlink()


def test_a_reader_that_has_gone_is_no_error() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    shown = subprocess.run(
        [sys.executable, "-m", "trainspec_cli", "--help"], stdout=write_end, stderr=subprocess.PIPE, text=True
    )
    os.close(write_end)
    assert (shown.returncode, shown.stderr) == (141, "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals(monkeypatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(Terminal()).red("x") == "\x1b[31mx\x1b[0m"
    assert Style.of(io.StringIO()).red("x") == "x"
    monkeypatch.setenv("NO_COLOR", "1")
    assert Style.of(Terminal()).red("x") == "x"


@pytest.mark.parametrize(
    ("sweep", "read"), [("a.b=1,2", ("a.b", ["1", "2"])), ("a=1,,2,", ("a", ["1", "2"])), ("a=x=y", ("a", ["x=y"]))]
)
def test_the_values_of_a_sweep(sweep, read) -> None:
    assert read_sweep(sweep) == read


@pytest.mark.parametrize("sweep", ["a", "a=", "=1", "", "a=,"])
def test_a_sweep_without_key_or_values_is_refused(sweep) -> None:
    with raises(RecipeError, "usage", f"`{sweep}`"):
        read_sweep(sweep)


@pytest.mark.parametrize("name", ["/no/such/file", b"/no/such/file", 7, "/" + "x" * 300])
def test_a_file_that_the_system_refuses_is_the_machines_fault(capsys, monkeypatch, name: str | bytes | int) -> None:
    def fail(*_: object) -> int:
        raise OSError(13, "Permission denied", name)

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == 4
    shown = "/" + "x" * 199 + "..." if len(str(name)) > 200 else "7" if name == 7 else "/no/such/file"
    assert capsys.readouterr().err == f"error: {shown}: Permission denied\n"
    assert main.run(["launch", "--json"]) == 4
    (error,) = json.loads(capsys.readouterr().out)["errors"]
    assert (error["code"], error["message"]) == ("refused_by_the_system", f"{shown}: Permission denied")


def test_a_fault_of_the_system_without_a_file_is_a_bug(capsys, monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == 1
    first, place = capsys.readouterr().err.splitlines()
    assert " bug: OSError" in first
    Path(place.removeprefix("the traceback is in ")).unlink()


def test_a_reader_that_goes_while_a_command_prints_is_no_error(monkeypatch) -> None:
    def fail(*_: object) -> int:
        raise BrokenPipeError(32, "Broken pipe", "a name")

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == 141


def test_what_was_printed_is_out_before_the_exit_code_is_known(monkeypatch) -> None:
    """A full disk or a closed pipe is met at the flush."""

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(28, "No space left on device", "stdout")

    monkeypatch.setattr(main, "dispatch", lambda *_: 0)
    monkeypatch.setattr(main, "printing_safely", contextlib.nullcontext)
    monkeypatch.setattr(main.sys, "stdout", Full())
    assert main.run(["runs"]) == 4


def test_main_ends_with_the_code_of_its_arguments(monkeypatch) -> None:
    monkeypatch.setattr(main.sys, "argv", ["trainspec", "launch", "x"])
    monkeypatch.setattr(main, "run", lambda arguments: 3 if arguments == ["launch", "x"] else 9)
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 3


@pytest.mark.parametrize(("raised", "label"), [(Stopped("s"), "stopped: s\n"), (Interrupted("i"), "stopped: i\n"),
                                               (RecipeError("r"), "error: r\n")])  # fmt: skip
def test_a_stop_is_no_error(capsys, monkeypatch, raised: Exception, label: str) -> None:
    def fail(*_: object) -> int:
        raise raised

    monkeypatch.setattr(main, "dispatch", fail)
    assert main.run(["launch"]) == raised.exit_code  # type: ignore[attr-defined]
    assert capsys.readouterr().err == label


@pytest.mark.parametrize("arguments", [["launch"], ["data"], ["data", "prepare"]])
def test_help_in_a_pipe_has_no_boxes_and_no_padding(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: ") and "─" not in said
    assert all(line == line.rstrip() for line in said.splitlines())
