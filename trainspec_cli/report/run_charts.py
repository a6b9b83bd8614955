"""Charts of a run: its losses, the parts of its steps and of its wall time, and what was predicted of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

from trainspec_cli.core.units import format_bytes, format_duration
from trainspec_cli.recipe.results.prediction import LocalPrediction
from trainspec_cli.report.collect import Report
from trainspec_cli.report.page.parts import bar_rows, number_row, plain_list, section, table
from trainspec_cli.report.run_lines import speed_lines
from trainspec_cli.report.run_speed import RunSpeed
from trainspec_cli.report.svg import LineSeries, Point, Segment, render_bar, render_curves, render_legend, thin
from trainspec_cli.run.folder.event_types.event import PARTS

LOSS_STRETCHES, HELDOUT_STRETCHES = 400, 40
"""A longer curve is thinned to the lowest and the highest of so many stretches."""
MARKED_POINTS = 40
"""Points of a longer curve have no dots."""
PART_KINDS = {name: f"c-{name}" for name in PARTS} | {"checkpoint": "c-saving"}
"""CSS classes; that of checkpoints has another colour in a plan's time lost."""


def curves_section(report: Report) -> str:
    heldout = [(event.step, event.heldout_loss) for event in report.evaluations]
    curves = (
        ("c-measure", "loss", thin(_points(report.loss), LOSS_STRETCHES)),
        ("c-heldout", "held-out loss", thin(_points(heldout), HELDOUT_STRETCHES)),
    )
    lines = [LineSeries(kind, name, points, len(points) <= MARKED_POINTS) for kind, name, points in curves if points]
    if not lines:
        return section("Loss", _beside(report) or "No step was made yet.", "")
    legend = render_legend([Segment(line.kind, line.label, 0.0, "") for line in lines])
    return section("Loss", _beside(report), render_curves(lines, "step", "loss") + legend)


def other_curves_section(report: Report) -> str:
    """Draw the gradient norm and the learning rate, each on axes of its own; nothing where a run has neither."""
    drawn = ""
    for name, curve in (("gradient norm", report.grad_norm), ("learning rate", report.lr)):
        if points := thin(_points(curve), LOSS_STRETCHES):
            drawn += render_curves([LineSeries("c-measure", name, points, len(points) <= MARKED_POINTS)], "step", name)
    return section("Gradient norm and learning rate", "", drawn) if drawn else ""


def _points(curve: Sequence[tuple[int, float | None]]) -> list[Point]:
    return sorted((float(step), value) for step, value in curve if value is not None)


def _beside(report: Report) -> str:
    """Say what the curve does not show."""
    said = []
    if missing := sum(value is None for _, value in report.loss):
        said.append(f"Steps whose loss was not finite: {missing:,}.")
    if report.skipped_steps:
        said.append(f"Updates left out as they were not finite: {len(report.skipped_steps):,}.")
    if len(report.loss) > 2 * LOSS_STRETCHES:
        said.append(f"Of {len(report.loss):,} steps the lowest and the highest of each stretch are drawn.")
    return " ".join(said)


def step_time_section(speed: RunSpeed, world_size: int, predicted: LocalPrediction | None) -> str:
    """Draw the parts of the mean step, which sum to it, and those that were predicted."""
    measured = _segments({part.name: part.mean_s for part in speed.parts})
    bars = [("measured", measured, speed.step_time_s)]
    if predicted:
        bars.append(("predicted", _segments(predicted.time_s), predicted.step_time_s))
    scale = max(math.fsum(segment.value for segment in segments) for _, segments, _ in bars)
    rows = [(name, render_bar(segments, scale), format_duration(seconds)) for name, segments, seconds in bars]
    text = "The mean over steps and ranks, in parts that sum to it."
    drawn = bar_rows(rows) + render_legend(measured) + plain_list(speed_lines(speed, world_size))
    return section("Where the time of a step went", text, drawn + _parts(speed, predicted))


def _segments(seconds: Mapping[str, float]) -> list[Segment]:
    return [
        Segment(PART_KINDS[name], name.replace("_", " "), seconds[name], format_duration(seconds[name]))
        for name in PARTS
        if seconds.get(name, 0.0) > 0
    ]


def _parts(speed: RunSpeed, predicted: LocalPrediction | None) -> str:
    by_rank = len(speed.ranks) > 1
    headings = ["part", "#time", "#share", *(["#by rank"] if by_rank else []), *(["#predicted"] if predicted else [])]
    rows = []
    for part in speed.parts:
        row = [part.name.replace("_", " "), format_duration(part.mean_s), f"{part.share:.1%}"]
        row += [f"{format_duration(part.min_s)} - {format_duration(part.max_s)}"] if by_rank else []
        row += [format_duration(predicted.time_s.get(part.name, 0.0))] if predicted else []
        rows.append(number_row(row))
    whole = ["whole step", format_duration(speed.step_time_s), "100.0%", *([""] if by_rank else [])]
    rows.append(number_row([*whole, *([format_duration(predicted.step_time_s)] if predicted else [])]))
    return table(headings, rows)


def prediction_section(report: Report, predicted: LocalPrediction) -> str:
    step_s = report.speed.step_time_s if report.speed else None
    rows = [
        _compared("step", predicted.step_time_s, step_s, format_duration),
        _compared("peak memory of one device", predicted.peak_memory_bytes, report.peak_memory_bytes, format_bytes),
    ]
    text = "What the plan foresaw, beside what was measured."
    return section("Predicted and measured", text, table(("", "#predicted", "#measured", "#difference"), rows))


def _compared(name: str, predicted: float, measured: float | None, show: Callable[[float], str]) -> str:
    difference = f"{measured / predicted - 1:+.1%}" if measured is not None and predicted > 0 else ""
    return number_row((name, show(predicted), "not known yet" if measured is None else show(measured), difference))


def wall_time_section(report: Report) -> str:
    """Draw where the time of all attempts went; buckets without any are left out."""
    wall_s = report.time_s.total_s
    if wall_s <= 0 or report.goodput is None:
        return ""
    spent = [(bucket.name.replace("_", " "), getattr(report.time_s, bucket.name)) for bucket in fields(report.time_s)]
    shown = [(name, seconds, f"{format_duration(seconds)}, {seconds / wall_s:.1%}") for name, seconds in spent]
    rows = [
        (name, render_bar([Segment("c-used", name, seconds, text)], wall_s), text)
        for name, seconds, text in shown
        if seconds > 0
    ]
    text = f"Goodput {report.goodput:.1%}, of {format_duration(wall_s)} from the first launch on."
    return section("Wall time", text, bar_rows(rows))
