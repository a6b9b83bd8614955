"""Make text safe for terminals, by escaping control characters and characters that hide or reorder others.

Recipes, run folders, data and file names may be untrusted, and their control characters could make a terminal change
its title, move the cursor, or hide and recolour text. `printing_safely` therefore replaces stdout and stderr with a
`PrintableStream` for all output. The `LastingStream` below it survives the closing of its terminal."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

_UNPRINTABLE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 except tab and newline, DEL, C1
    "\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u3164\uffa0"  # invisible letters and marks
    "\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"  # zero-width, line separators, direction overrides and isolates
    "\ufeff\ufff9-\ufffb\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"  # further format characters
    "\U000e0000-\U000e007f"  # tags
    "\ud800-\udfff"  # surrogates: bytes of a file name that are not UTF-8
    "]"
)
"""Joiners (U+200C, U+200D) are kept: they neither hide nor reorder text, and Persian, Hindi and emoji need them."""

_COLOUR = re.compile(r"\x1b\[[0-9;:]*[mK]")


def printable(text: str) -> str:
    """Replace control and invisible characters with escapes such as `\\x1b`; keep newlines and tabs."""
    return _UNPRINTABLE.sub(lambda found: _escape(found[0]), text)


def on_one_line(text: str) -> str:
    """Escape like `printable`, and newlines and tabs as well."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def is_printable(text: str) -> bool:
    return not _UNPRINTABLE.search(text)


def without_colours(text: str) -> str:
    """Remove the colour codes that programs write into their logs."""
    return _COLOUR.sub("", text)


def _escape(character: str) -> str:
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # Python's replacement character for an undecodable byte
        number -= 0xDC00
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


class PrintableStream:
    """A text stream that makes everything written to it printable, except for the program's own colours. Colour codes
    start with `escape` instead of ESC. This string is different for every stream, so no other text can contain it. Rich
    finds the wrapped stream in `rich_proxied_file`; its consoles do their own escaping (reporter/console.py)."""

    def __init__(self, stream: TextIO | LastingStream):
        self.rich_proxied_file = stream
        self.escape = f"\x1b{os.urandom(8).hex()}"

    def write(self, text: str) -> int:
        # Only the program knows this stream's escape, so a colour code in any other text is shown as text.
        safe = "\x1b".join(map(printable, text.split(self.escape)))
        encoding = self.rich_proxied_file.encoding or "utf-8"
        # A character that the terminal's encoding does not support must not make a command fail.
        self.rich_proxied_file.write(safe.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


class LastingStream:
    """A text stream that drops output after its terminal has been closed. Such writes fail with EIO, which must not end
    a command. (A closing terminal also sends SIGHUP.) `ends_at`: the errors that indicate the end of the stream."""

    def __init__(self, stream: TextIO, ends_at: Sequence[int] = (errno.EIO,)):
        self._stream = stream
        self._ends_at = ends_at

    def write(self, text: str) -> int:
        with self._discard_when_closed():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._discard_when_closed():
            self._stream.flush()

    @contextmanager
    def _discard_when_closed(self) -> Iterator[None]:
        """After the first failed write, redirect the stream, including its buffered output, to /dev/null."""
        try:
            yield
        except OSError as error:
            if error.errno not in self._ends_at or error.filename is not None:
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printing_safely() -> Iterator[None]:
    """Pass all output of the block through a `PrintableStream` on top of a `LastingStream`."""
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (PrintableStream(LastingStream(stream)) for stream in streams)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams


def cut_middle(text: str, most_chars: int) -> str:
    """Shorten `text` to at most `most_chars` characters, by omitting the middle."""
    if len(text) <= most_chars:
        return text
    kept = most_chars - len(" ... ")
    return f"{text[: kept - kept // 2]} ... {text[len(text) - kept // 2 :]}"


# Format quantities. A GiB is 2**30 bytes, and a GB is 1e9 bytes.


KIB = 2**10
MIB = 2**20
GIB = 2**30
TIB = 2**40

_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def label_node(node: int, hostname: str) -> str:
    """`node 3 (gpu17)`, or `node 3` if the hostname is unknown."""
    return f"node {node}" + (f" ({hostname})" if hostname else "")


def list_ranks(ranks: Sequence[int], most: int = 8) -> str:
    """Return `rank 3` or `ranks 0, 2`, and the number of those that are left out."""
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:most]))}{more}"


def format_si(value: float, unit: str = "", digits: int = 3) -> str:
    """Format with an SI prefix: `1.25e12` -> `1.25 T`; values below 1,000 get no prefix."""
    for scale, prefix in _SI:
        if abs(value) >= scale:
            return f"{value / scale:.{digits}g} {prefix}{unit}".rstrip()
    return f"{value:.{digits}g} {unit}".rstrip()


def format_count(value: float) -> str:
    """Format counts of parameters or tokens: `6_400_000` -> `6.4M`, `8.03e9` -> `8.03B`."""
    for scale, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.4g}"


def format_params(params: int, adapters: int = 0) -> str:
    """Format a model's size: `8.03B parameters`; with LoRA adapters `8.07B parameters, 42M of them trained`."""
    trained = f", {format_count(adapters)} of them trained" if adapters else ""
    return f"{format_count(params + adapters)} parameters{trained}"


def format_bytes(value: float) -> str:
    """Format with a binary prefix: `2**31` -> `2.00 GiB`."""
    for scale, unit in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= scale:
            return f"{value / scale:.2f} {unit}"
    return f"{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format with three digits: `0.0545` -> `54.5 ms`, `12.345` -> `12.3 s`."""
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:,.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def format_duration(seconds: float) -> str:
    """Format with at most two units: `93.2` -> `1 min 33 s`."""
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    return f"{hours // 24} d {hours % 24} h"


# Format output in colour and columns for terminals, and as plain text for pipes. No library is imported, so that help
# and errors appear immediately.


@dataclass(frozen=True)
class Style:
    coloured: bool
    escape: str = "\x1b"
    """The character that starts a colour: ESC, or its substitute on a `PrintableStream`."""

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Return the style for a stream: plain text if NO_COLOR is set (no-color.org) or the terminal is dumb."""
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(not plain and stream.isatty(), getattr(stream, "escape", "\x1b"))

    def bold(self, text: str) -> str:
        return self._wrap(text, 1)

    def dim(self, text: str) -> str:
        return self._wrap(text, 2)

    def red(self, text: str) -> str:
        return self._wrap(text, 31)

    def green(self, text: str) -> str:
        return self._wrap(text, 32)

    def cyan(self, text: str) -> str:
        return self._wrap(text, 36)

    def _wrap(self, text: str, code: int) -> str:
        return f"{self.escape}[{code}m{text}{self.escape}[0m" if self.coloured and text else text


def aligned(rows: Sequence[Sequence[str]], numbers: Container[int] = ()) -> list[str]:
    """Lay out rows of cells in columns, with one line per row. Columns whose indices are in `numbers` are
    right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        places = enumerate(zip(row, widths, strict=True))
        cells = (text.rjust(width) if place in numbers else text.ljust(width) for place, (text, width) in places)
        lines.append("  ".join(cells).rstrip())
    return lines
