"""Colour and columns for terminals, plain text for pipes; without a library, so that help and errors appear quickly."""

from __future__ import annotations

import os
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Style:
    coloured: bool
    escape: str = "\x1b"
    """The character that starts a colour: ESC, or its substitute on a `PrintableStream`."""

    @classmethod
    def of(cls, stream: TextIO) -> Style:
        """Return the style for a stream; NO_COLOR (no-color.org) and dumb terminals get plain text."""
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
    """Lay out rows of cells in columns, one line each; the columns with indices in `numbers` are right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        places = enumerate(zip(row, widths, strict=True))
        cells = (text.rjust(width) if place in numbers else text.ljust(width) for place, (text, width) in places)
        lines.append("  ".join(cells).rstrip())
    return lines
