"""What a terminal would obey, or would not show, is escaped; all other text stays as it is."""

from __future__ import annotations

import errno
import io
import json
import os
import pty
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.core.printable import (
    LastingStream,
    PrintableStream,
    Style,
    format_bytes,
    format_count,
    format_duration,
    format_seconds,
    format_si,
    is_printable,
    on_one_line,
    printable,
    printing_safely,
    without_colours,
)
from trainspec_cli.reporter.console import PrintableConsole

JOINERS = "\u200c\u200d"
SIGNS = [
    *range(0x600, 0x606),
    *(0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD),
]
"""Format characters that are seen: Arabic, Syriac and Kaithi signs of numbers, verses and abbreviations."""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_no_control_or_invisible_format_character_is_printable() -> None:
    kept = {*map(chr, SIGNS), *JOINERS, "\n", "\t"}
    hidden = [
        c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
    ]
    assert [hex(ord(c)) for c in hidden if is_printable(c) != (c in kept)] == []


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", "\\x1b]0;owned\\x07"),
        ("\x9b2J\x7f\r\b", "\\x9b2J\\x7f\\x0d\\x08"),
        ("abc\u202efdp.exe\u2066", "abc\\u202efdp.exe\\u2066"),
        ("\ufeffa\u200bb\u3164", "\\ufeffa\\u200bb\\u3164"),
        ("\U000e0041", "\\U000e0041"),
        ("name\udc9b.yaml", "name\\x9b.yaml"),
        ("two\nlines\tand a tab", "two\nlines\tand a tab"),
        ("Grüße, 日本語, سلام, می‌خواهم, 👩‍🔬, C:\\x1b", "Grüße, 日本語, سلام, می‌خواهم, 👩‍🔬, C:\\x1b"),
    ],
)
def test_escapes_are_seen_and_text_stays(text: str, shown: str) -> None:
    assert printable(text) == shown


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters()))
def test_what_was_made_printable_is(text: str) -> None:
    safe = printable(text)
    assert is_printable(safe) and printable(safe) == safe
    assert (safe == text) == is_printable(text)
    assert not set("\n\t") & set(on_one_line(text))
    safe.encode()


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.booleans(), st.text(st.sampled_from("ab\x1b[31m\x9b\n") | st.characters()))))
def test_a_stream_passes_its_own_colours_alone(pieces: list[tuple[bool, str]]) -> None:
    terminal = Terminal()
    stream = PrintableStream(terminal)
    style = Style(coloured=True, escape=stream.escape)
    for is_ours, text in pieces:
        print(style.red(text) if is_ours else text, end="", file=stream)
    expected = [f"\x1b[31m{printable(text)}\x1b[0m" if ours and text else printable(text) for ours, text in pieces]
    assert terminal.getvalue() == "".join(expected)


def test_no_stream_has_the_mark_of_another() -> None:
    first, second = PrintableStream(Terminal()), PrintableStream(Terminal())
    print(f"{first.escape}[31m", file=second)
    assert "\x1b" not in second.getvalue()


def test_what_an_encoding_lacks_is_escaped() -> None:
    raw = io.BytesIO()
    stream = PrintableStream(io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    print("a · b", file=stream)
    assert raw.getvalue() == b"a \\xb7 b\n"


def test_both_outputs_are_safe_and_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(ValueError, match="stop"), printing_safely():
        print("\x1b[2J")
        sys.stderr.writelines(["\x9b", "31m\n"])
        raise ValueError("stop")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("\\x1b[2J\n", "\\x9b31m\n")


def test_colours_of_programs_are_dropped() -> None:
    assert (
        without_colours("\x1b[1;31mred\x1b[0m and \x1b[38:5:213mpink\x1b[m\x1b[K, \x1b]0;t") == "red and pink, \x1b]0;t"
    )


@settings(deadline=None, max_examples=50)
@given(st.text())
def test_json_is_ascii_and_stays_as_it_is_on_a_stream(text: str) -> None:
    """So no value is lost, and none needs an escape that JSON does not have."""
    terminal = Terminal()
    print(json.dumps(text), end="", file=PrintableStream(terminal))
    assert json.loads(terminal.getvalue()) == text


def test_every_undecodable_byte_is_shown_as_that_byte() -> None:
    assert printable("\udc80\udcff") == "\\x80\\xff"


@pytest.fixture
def closed_terminal() -> Iterator[TextIO]:
    """A terminal that is closed after a first line was written to it."""
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", buffering=1) as terminal:
        terminal.write("seen\n")
        os.close(master)
        yield terminal


def test_what_is_written_to_a_terminal_that_was_closed_is_dropped(closed_terminal: TextIO) -> None:
    stream = PrintableStream(LastingStream(closed_terminal))
    print("a line", file=stream)
    PrintableConsole(file=stream.rich_proxied_file).print("a table")  # type: ignore[arg-type]
    stream.flush()


def test_other_errors_of_a_stream_are_raised() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        LastingStream(Full()).write("a line")


def test_safe_printing_outlives_its_terminal(closed_terminal: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", closed_terminal)
    with printing_safely():
        print("a line", flush=True)
        print("another", flush=True)


# Quantities as text, at the edges of their units.


QUANTITIES = {
    format_duration: {
        0: "0 ms", 0.0124: "12 ms", 0.999: "999 ms", 1: "1.0 s", 59.94: "59.9 s", 60: "1 min 0 s", 93.2: "1 min 33 s",
        3599: "59 min 59 s", 3600: "1 h 0 min", 9000: "2 h 30 min", 47 * 3600 + 59 * 60: "47 h 59 min",
        48 * 3600: "2 d 0 h", 100 * 3600: "4 d 4 h",
    },
    format_seconds: {0.0545: "54.5 ms", 0.9: "900 ms", 12.345: "12.3 s", 1234.5: "1,234 s"},
    format_bytes: {
        0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 1.5 * 2**20: "1.50 MiB", 2**30 - 1: "1024.00 MiB",
        2**31: "2.00 GiB", 2**40: "1.00 TiB", -(2**20): "-1.00 MiB",
    },
    format_count: {
        0: "0", 999: "999", 1000: "1k", 6_400_000: "6.4M", 8.03e9: "8.03B", 1e12: "1T", -2e6: "-2M",
    },
    partial(format_si, unit="W"): {
        0: "0 W", 999: "999 W", 1000: "1 kW", 1e6: "1 MW", 1.25e9: "1.25 GW", 1e12: "1 TW", 2e15: "2 PW", 3e18: "3 EW",
        -1500: "-1.5 kW",
    },
    format_si: {1.25e12: "1.25 T", 7: "7"},
    partial(format_si, unit="B", digits=4): {123456: "123.5 kB"},
}  # fmt: skip


@pytest.mark.parametrize("show", QUANTITIES)
def test_quantities(show: Callable[[float], str]) -> None:
    assert {value: show(value) for value in QUANTITIES[show]} == QUANTITIES[show]
