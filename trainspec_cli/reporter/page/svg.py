"""Charts as inline SVG: stacked bars that scale with the page, and line charts on logarithmic or linear axes. They need
no scripts and no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

BAR_HEIGHT = 22
CHART_WIDTH = 760
CHART_HEIGHT = 320
MARGIN_LEFT = 64
MARGIN_RIGHT = 24
MARGIN_TOP = 34
MARGIN_BOTTOM = 44
MOST_EVEN_TICKS = 6
MOST_DIGITS = 6

Point = tuple[float, float]


@dataclass(frozen=True)
class Segment:
    """One part of a bar. `kind` is the CSS class that colours it."""

    kind: str
    label: str
    value: float
    shown: str


@dataclass(frozen=True)
class LineSeries:
    """A line of a chart: points (x, y) with increasing x. On logarithmic axes, both coordinates are positive."""

    kind: str
    label: str
    points: Sequence[Point]
    marked: bool = True
    """Whether every point is marked with a dot."""


def render_bar(segments: Sequence[Segment], scale: float, limit: float | None = None) -> str:
    """Draw stacked segments whose lengths are relative to `scale`, with a line across the bar at `limit`."""
    drawn = []
    at = 0.0
    for segment in segments:
        tip = escape(f"{segment.label}: {segment.shown}")
        width = segment.value / scale
        drawn.append(
            f'<rect class="segment {segment.kind}" x="{at:.3%}" width="{width:.3%}" height="{BAR_HEIGHT}">'
            f"<title>{tip}</title></rect>"
        )
        at += width
    if limit is not None:
        place = f"{limit / scale:.3%}"
        drawn.append(f'<line class="limit" x1="{place}" x2="{place}" y1="0" y2="{BAR_HEIGHT}"/>')
    shown = escape("; ".join(f"{segment.label} {segment.shown}" for segment in segments))
    return f'<svg class="bar" height="{BAR_HEIGHT}" role="img" aria-label="{shown}">{"".join(drawn)}</svg>'


def render_legend(segments: Sequence[Segment], with_values: bool = True) -> str:
    entries = [
        f'<li><i class="swatch {segment.kind}"></i>{escape(segment.label)}'
        + (f" <b>{escape(segment.shown)}</b>" if with_values and segment.shown else "")
        + "</li>"
        for segment in segments
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def render_lines(lines: Sequence[LineSeries], x_title: str, y_title: str, ticks: Sequence[tuple[float, str]]) -> str:
    """Draw a chart with two logarithmic axes, on which power laws are straight lines. `ticks` label positions on the x
    axis."""
    xs, ys = _places(lines)
    frame = _Frame(min(xs), max(xs), min(ys) / 1.15, max(ys) * 1.15)
    return _chart(frame, lines, (x_title, y_title), ticks)


def render_curves(lines: Sequence[LineSeries], x_title: str, y_title: str) -> str:
    """Draw a chart with two linear axes; x values are whole numbers."""
    xs, ys = _places(lines)
    low = min(ys)
    high = max(ys)
    # Widen the range, because a flat curve would otherwise lie on the frame or lead to a division by 0.
    margin = abs(low) * 0.1 or 1.0 if _is_flat(low, high) else 0.05 * (high - low)
    frame = _Frame(min(xs), max(xs), low - margin, high + margin, even=True)
    # Steps are whole numbers, so their ticks are too.
    whole = [x for x in even_ticks(min(xs), max(xs)) if x == round(x)]
    return _chart(frame, lines, (x_title, y_title), [(x, f"{x:,.0f}") for x in whole])


def thin(points: Sequence[Point], stretches: int) -> list[Point]:
    """Thin out a long line. Keep its first and last points, and the lowest and highest points of each stretch."""
    if len(points) <= 2 * stretches:
        return list(points)
    bounds = [len(points) * place // stretches for place in range(stretches + 1)]
    kept = {0, len(points) - 1}
    for begin, end in pairwise(bounds):
        heights = {points[place][1]: place for place in range(begin, end)}
        # Extremes are kept instead of averages, so that a single-step spike stays visible.
        kept |= {heights[min(heights)], heights[max(heights)]}
    return [points[place] for place in sorted(kept)]


def _places(lines: Sequence[LineSeries]) -> tuple[list[float], list[float]]:
    return [x for line in lines for x, _ in line.points], [y for line in lines for _, y in line.points]


def _chart(
    frame: _Frame, lines: Sequence[LineSeries], titles: tuple[str, str], ticks: Sequence[tuple[float, str]]
) -> str:
    x_title, y_title = map(escape, titles)
    middle = (MARGIN_LEFT + CHART_WIDTH - MARGIN_RIGHT) / 2
    left = MARGIN_LEFT
    right = CHART_WIDTH - MARGIN_RIGHT
    bottom = CHART_HEIGHT - MARGIN_BOTTOM
    grid = []
    for value, label in frame.y_ticks():
        y = frame.y(value)
        grid.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for value, label in ticks:
        x = frame.x(value)
        grid.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>')
    grid.append(f'<line class="axis" x1="{left}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts = [
        "".join(grid),
        *(_draw(line, frame) for line in lines),
        f'<text class="title" x="{middle}" y="{CHART_HEIGHT - 6}" text-anchor="middle">{x_title}</text>',
        f'<text class="title" x="{MARGIN_LEFT}" y="{MARGIN_TOP - 16}">{y_title}</text>',
    ]
    view = f'viewBox="0 0 {CHART_WIDTH} {CHART_HEIGHT}"'
    return f'<svg class="chart" {view} role="img" aria-label="{y_title}">{"".join(parts)}</svg>'


@dataclass(frozen=True)
class _Frame:
    x_low: float
    x_high: float
    y_low: float
    y_high: float
    even: bool = False
    """True if both axes are linear; False if both are logarithmic."""

    def x(self, value: float) -> float:
        inner = CHART_WIDTH - MARGIN_LEFT - MARGIN_RIGHT
        return MARGIN_LEFT + inner * self._part(value, self.x_low, self.x_high)

    def y(self, value: float) -> float:
        inner = CHART_HEIGHT - MARGIN_TOP - MARGIN_BOTTOM
        return MARGIN_TOP + inner * (1 - self._part(value, self.y_low, self.y_high))

    def _part(self, value: float, low: float, high: float) -> float:
        if low == high:
            return 0.5
        return (value - low) / (high - low) if self.even else math.log(value / low) / math.log(high / low)

    def y_ticks(self) -> list[tuple[float, str]]:
        if not self.even:
            return [(value, _short(value)) for value in nice_ticks(self.y_low, self.y_high)]
        values = even_ticks(self.y_low, self.y_high)
        step = values[1] - values[0] if len(values) > 1 else 1.0
        # With fewer digits, neighbouring ticks on a flat curve would get the same label.
        digits = max(0, -math.floor(math.log10(step)))
        fits = digits < MOST_DIGITS and max(map(abs, values)) < 10**MOST_DIGITS
        return [(value, f"{value:,.{digits}f}" if fits else _short(value)) for value in values]


def nice_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2 and 5 times the powers of ten in the range or, if that would be too many ticks, only the powers of
    ten."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(powers) <= 4 else (1,)
    return [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]


def even_ticks(low: float, high: float) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten in the range, with the smallest spacing that keeps the
    number of ticks low."""
    span = high - low
    if _is_flat(low, high):
        return [low]
    power = 10.0 ** math.floor(math.log10(span / MOST_EVEN_TICKS))
    step = next(size * power for size in (1, 2, 5, 10) if span / (size * power) <= MOST_EVEN_TICKS)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _is_flat(low: float, high: float) -> bool:
    """Return whether the two values are too close to be distinguished in floating-point arithmetic."""
    return high - low <= 1e-12 * max(abs(low), abs(high))


def _draw(line: LineSeries, frame: _Frame) -> str:
    places = [(frame.x(x), frame.y(y)) for x, y in line.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    drawn = [f'<polyline class="line {line.kind}" points="{path}"/>']
    if line.marked:
        for (x, y), (at, value) in zip(places, line.points, strict=True):
            tip = escape(f"{line.label}: {_short(value)} at {at:,.0f}")
            drawn.append(
                f'<circle class="dot {line.kind}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{tip}</title></circle>'
            )
    return "".join(drawn)


def _short(value: float) -> str:
    for scale, suffix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{suffix}"
    return f"{value:.3g}"
