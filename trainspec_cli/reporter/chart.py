"""Curves in a terminal, drawn with braille characters: two dots wide and four high in every cell."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence

Point = tuple[float, float]

_BLANK = 0x2800
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character: column, then row from the top."""


def render_chart(
    points: Sequence[tuple[float, float | None]], *, width: int = 64, height: int = 10, title: str = ""
) -> str:
    """Draw `points` (x, y) in `width` x `height` cells plus axes.

    Points in the same dot column are averaged; non-finite points are skipped. Without points, return an empty text.
    """
    first = min((x for x, _ in _finite(points)), default=None)
    last = max((x for x, _ in _finite(points)), default=None)
    if first is None or last is None:
        return ""
    # Points are averaged instead of sampled, so that a single noisy step does not distort a long curve.
    columns = _column_means(_finite(points), width * 2, first, last)
    low, high = _padded_range([y for y in columns if y is not None])
    rows = [row.rstrip(chr(_BLANK)) for row in _draw_braille(columns, low, high, width, height)]
    return _with_axes(rows, (low, high), (first, last), width, title)


def render_overlay(curves: Mapping[str, Sequence[Point]], *, width: int = 64, height: int = 14, title: str = "") -> str:
    """Draw several curves on the same axes, each with its own character, and `*` where two overlap. Points are averaged
    as in `render_chart`."""
    finite = {
        mark: sorted((x, y) for x, y in points if math.isfinite(x) and math.isfinite(y))
        for mark, points in curves.items()
    }
    everything = sorted(point for points in finite.values() for point in points)
    if not everything:
        return ""
    first = everything[0][0]
    last = everything[-1][0]
    means = {mark: _column_means(points, width, first, last) for mark, points in finite.items()}
    low, high = _padded_range([y for columns in means.values() for y in columns if y is not None])
    cells = [[" "] * width for _ in range(height)]
    for mark, columns in means.items():
        for x, y in ((x, y) for x, y in enumerate(columns) if y is not None):
            row = cells[round((high - y) / (high - low) * (height - 1))]
            row[x] = mark if row[x] == " " else "*"
    return _with_axes(["".join(row).rstrip() for row in cells], (low, high), (first, last), width, title)


def _with_axes(
    rows: Sequence[str], y_range: tuple[float, float], x_range: tuple[float, float], width: int, title: str
) -> str:
    low, high = y_range
    last_row = len(rows) - 1
    labels = [""] * len(rows)
    for row in {0, last_row // 2, last_row}:
        share = row / last_row if last_row else 0.0
        labels[row] = f"{high - share * (high - low):.3g}"
    margin = max(map(len, labels))
    lines = [title] if title else []
    lines += [f"{label:>{margin}} ┤{drawn}" for label, drawn in zip(labels, rows, strict=True)]
    lines.append(" " * margin + " └" + "─" * width)
    first, last = (f"{x:g}" for x in x_range)
    lines.append(" " * (margin + 2) + first + last.rjust(width - len(first)))
    return "\n".join(lines)


def _finite(points: Iterable[tuple[float, float | None]]) -> Iterator[Point]:
    """Return the finite points lazily, so that a long curve is iterated over several times instead of being copied into
    a list."""
    return ((float(x), y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y))


def _column_means(points: Iterable[Point], columns: int, first: float, last: float) -> list[float | None]:
    """Return the mean of the points in each column from `first` to `last`; None for a column without points."""
    span = (last - first) or 1.0
    buckets = [array("d") for _ in range(columns)]
    for x, y in points:
        buckets[min(columns - 1, int((x - first) / span * (columns - 1) + 0.5))].append(y)
    return [math.fsum(bucket) / len(bucket) if bucket else None for bucket in buckets]


def _padded_range(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of the y axis, widened for a flat curve so that it is drawn in the middle."""
    low = min(values)
    high = max(values)
    # A zero range would lead to a division by 0 when heights are scaled.
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def _draw_braille(columns: Sequence[float | None], low: float, high: float, width: int, height: int) -> list[str]:
    """Return rows of braille characters, top row first; neighbouring points are connected by lines."""
    cells = [[_BLANK] * width for _ in range(height)]
    dots_high = height * 4
    before: tuple[int, int] | None = None
    for column, value in enumerate(columns):
        if value is None:
            continue
        dot = column, round((high - value) / (high - low) * (dots_high - 1))
        for x, y in _line(before or dot, dot):
            cells[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        before = dot
    return ["".join(map(chr, row)) for row in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots from `start` to `end`, inclusive."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (start[0] + round((end[0] - start[0]) * step / steps), start[1] + round((end[1] - start[1]) * step / steps))
        for step in range(steps + 1)
    ]
