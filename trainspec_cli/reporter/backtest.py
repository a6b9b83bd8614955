"""Render a backtest: tables for the terminal, and an SVG chart of predicted against measured step times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from trainspec_cli.core.printable import printable
from trainspec_cli.recipe.results.tables import BacktestReport, ErrorSummary


def render_backtest(report: BacktestReport) -> str:
    """Render the errors (overall, and by source, model and chip), followed by the sweeps, the rejected rows and the
    assumptions."""
    summary = report.summary
    lines = [f"{summary.rows} rows, {summary.predicted} predicted, {summary.refused} rejected"]
    if summary.step_time_mape is not None:
        lines.append(
            f"step time: mean error {summary.step_time_mape:.1%}, median {summary.step_time_median_ape:.1%}, "
            f"bias {summary.bias:+.1%}, over {summary.judged} measured rows"
        )
    kinds = (("sources that the planner was fitted to", summary.fitted), ("unseen sources", summary.unseen))
    for kind, group in kinds:
        if group:
            lines.append(
                f"  {kind}: mean error {group.mape:.1%}, median {group.median_ape:.1%}, bias {group.bias:+.1%}, "
                f"nine in ten within x{group.known_within:.2f}, over {group.rows} rows"
            )
    if summary.memory_mape is not None:
        worst = summary.memory_worst_under
        lines.append(f"memory: mean error {summary.memory_mape:.1%}, largest underestimate {worst:+.1%}")
    blocks = ["\n".join(lines)]
    for title, groups in (("source", summary.by_source), ("model", summary.by_model), ("chip", summary.by_gpu)):
        if groups:
            blocks.append(_errors(title, groups))
    if summary.sweeps:
        near = sum(sweep.loss <= 0.05 for sweep in summary.sweeps)
        of_all = f"{near} of {len(summary.sweeps)}"
        lines = [f"sweeps of layouts: the one predicted fastest is within 5% of the fastest in {of_all}"]
        for sweep in sorted(summary.sweeps, key=lambda item: -item.loss)[:5]:
            lines.append(f"  {sweep.loss:6.1%} slower: {sweep.model} on {sweep.gpu}, {sweep.layouts} layouts")
        blocks.append("\n".join(lines))
    if summary.refused:
        reasons = [f"  {count:5d}  {reason}" for reason, count in summary.refused_by_reason.items()]
        blocks.append("\n".join(["refused", *reasons]))
    counts: dict[str, int] = {}
    for row in report.rows:
        for what in row.assumed:
            counts[what] = counts.get(what, 0) + 1
    assumed = [f"  {count:5d}  {what}" for what, count in sorted(counts.items(), key=lambda item: -item[1])]
    if assumed:
        blocks.append("\n".join(["assumed where a row does not state it", *assumed]))
    return "\n\n".join(blocks)


def _errors(title: str, groups: Mapping[str, ErrorSummary]) -> str:
    width = max(len(title), *(min(len(name), 40) for name in groups))
    lines = [f"{title:{width}}   rows   mean  median    bias"]
    for name, group in groups.items():
        figures = f"{group.mape:7.1%} {group.median_ape:7.1%} {group.bias:+7.1%}"
        lines.append(f"{name[:40]:{width}}  {group.rows:5d} {figures}")
    return "\n".join(lines)


# The chart, which is self-contained and has two logarithmic axes

SIZE = 560
MARGIN = 56
COLOURS = ("#3b6fb6", "#d1662a", "#3d9a50", "#a84fa0", "#b59a1c", "#5aa7b0", "#8a5a44", "#777777")

Point = tuple[float, float, str]


def render_scatter(points: Sequence[Point]) -> str:
    """Draw points (measured seconds, predicted seconds, group) as an SVG, with the line of zero error and a band of 15%
    around it."""
    low = math.floor(math.log10(min(min(p[0], p[1]) for p in points)))
    high = math.ceil(math.log10(max(max(p[0], p[1]) for p in points)))
    scale = _Scale(low, max(high, low + 1))
    groups = sorted({group for _, _, group in points})
    colours = {group: COLOURS[index % len(COLOURS)] for index, group in enumerate(groups)}
    start = 10.0**scale.low
    end = 10.0**scale.high
    band = (
        f"{scale.x(start)},{scale.y(start * 1.15)} {scale.x(end / 1.15)},{scale.y(end)} {scale.x(end)},{scale.y(end)}"
    )
    band += f" {scale.x(end)},{scale.y(end * 0.85)} {scale.x(start / 0.85)},{scale.y(start)}"
    frame = [f'<polygon points="{band}" fill="#eef2f7"/>']
    frame.append(_line(scale.x(start), scale.y(start), scale.x(end), scale.y(end), "#99a"))
    for power in range(scale.low, scale.high + 1):
        value = 10.0**power
        frame.append(_line(scale.x(value), scale.y(start), scale.x(value), scale.y(end), "#e4e4e4"))
        frame.append(_line(scale.x(start), scale.y(value), scale.x(end), scale.y(value), "#e4e4e4"))
        label = f"{value:g} s"
        frame.append(f'<text x="{scale.x(value)}" y="{SIZE - MARGIN + 16}" text-anchor="middle">{label}</text>')
        frame.append(f'<text x="{MARGIN - 6}" y="{scale.y(value) + 4}" text-anchor="end">{label}</text>')
    frame.append(f'<text x="{SIZE / 2}" y="{SIZE - 14}" text-anchor="middle">measured step time</text>')
    turn = f'transform="rotate(-90 14 {SIZE / 2})"'
    frame.append(f'<text x="14" y="{SIZE / 2}" text-anchor="middle" {turn}>predicted step time</text>')
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" font-family="sans-serif" font-size="11">',
        f'<rect width="{SIZE}" height="{SIZE}" fill="white"/>',
        *frame,
    ]
    for measured, predicted, group in points:
        place = f'cx="{scale.x(measured)}" cy="{scale.y(predicted)}"'
        parts.append(f'<circle {place} r="2.2" fill="{colours[group]}" fill-opacity="0.6"/>')
    for index, group in enumerate(groups):
        y = MARGIN + 8 + 15 * index
        parts.append(f'<circle cx="{MARGIN + 12}" cy="{y}" r="4" fill="{colours[group]}"/>')
        parts.append(f'<text x="{MARGIN + 21}" y="{y + 4}">{escape(group)}</text>')
    return printable("\n".join([*parts, "</svg>", ""]))


class _Scale:
    def __init__(self, low: int, high: int):
        self.low = low
        self.high = high

    def x(self, value: float) -> float:
        return round(MARGIN + (math.log10(value) - self.low) / (self.high - self.low) * (SIZE - 2 * MARGIN), 1)

    def y(self, value: float) -> float:
        return round(SIZE - self.x(value), 1)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{colour}"/>'
