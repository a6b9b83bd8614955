"""Render the page of a run: its curves, where its time went, what slowed it down, and what was predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainspec_cli.core.printable import format_bytes, format_duration, format_si
from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.reporter.changes import RunChange, describe_recovery
from trainspec_cli.reporter.collect import Curve, Report
from trainspec_cli.reporter.page.parts import (
    PageOrigin,
    bar_rows,
    details,
    heading,
    note,
    origin_line,
    plain_list,
    preformatted,
    render_page,
    section,
    shorten,
    table,
    text_row,
    text_table,
    tiles,
)
from trainspec_cli.reporter.page.svg import LineSeries, Point, Segment, render_bar, render_curves, render_legend, thin
from trainspec_cli.reporter.plan.labels import format_rate
from trainspec_cli.reporter.run_speed import RunSpeed, part_rows, speed_lines
from trainspec_cli.reporter.runs import ALIVE
from trainspec_cli.reporter.text import (
    describe_evaluation,
    describe_event,
    facts_of,
    heldout_title,
    scheduler_changes,
    status_line,
    title_of,
    wall_time_rows,
    warning_lines,
)
from trainspec_cli.reporter.verdicts import verdicts_section
from trainspec_cli.run.folder.event_types.events import PARTS

# Charts of a run: its losses, its steps and wall time by part, and the predictions.


LOSS_STRETCHES, HELDOUT_STRETCHES = 400, 40
"""A long curve is divided into this many stretches, and only the lowest and highest value of each is drawn."""
MARKED_POINTS = 40
"""With more points than this, a curve is drawn without dots."""
PART_KINDS = {name: f"c-{name}" for name in PARTS} | {"checkpoint": "c-saving"}
"""CSS classes of the parts. (In a plan's "time lost", checkpoints have another colour.)"""


def curves_section(report: Report) -> str:
    heldout = [(event.step, event.heldout_loss) for event in report.evaluations]
    curves = (
        ("c-measure", "loss", thin(_points(report.loss), LOSS_STRETCHES)),
        ("c-heldout", "held-out loss", thin(_points(heldout), HELDOUT_STRETCHES)),
    )
    lines = [LineSeries(kind, name, points, len(points) <= MARKED_POINTS) for kind, name, points in curves if points]
    if not lines:
        return section("Loss", _beside(report) or "No steps yet.", "")
    legend = render_legend([Segment(line.kind, line.label, 0.0, "") for line in lines])
    return section("Loss", _beside(report), render_curves(lines, "step", "loss") + legend)


def _points(curve: Sequence[tuple[int, float | None]]) -> list[Point]:
    return sorted((float(step), value) for step, value in curve if value is not None)


def _beside(report: Report) -> str:
    """Describe what the curve does not show."""
    said = []
    if missing := sum(value is None for _, value in report.loss):
        said.append(f"Steps whose loss was not finite: {missing:,}.")
    if report.skipped_steps:
        said.append(f"Updates skipped because they were not finite: {len(report.skipped_steps):,}.")
    if len(report.loss) > 2 * LOSS_STRETCHES:
        said.append(f"Of {len(report.loss):,} steps, the lowest and the highest of each interval are drawn.")
    return " ".join(said)


def step_time_section(speed: RunSpeed, world_size: int, predicted: LocalPrediction | None) -> str:
    """Draw the parts of the mean step as bars, measured and predicted."""
    measured = _segments({part.name: part.mean_s for part in speed.parts})
    bars = [("measured", measured, speed.step_time_s)]
    if predicted:
        bars.append(("predicted", _segments(predicted.time_s), predicted.step_time_s))
    scale = max(math.fsum(segment.value for segment in segments) for _, segments, _ in bars)
    rows = [(name, render_bar(segments, scale), format_duration(seconds)) for name, segments, seconds in bars]
    text = "The mean over steps and ranks, divided into parts."
    drawn = bar_rows(rows) + render_legend(measured) + plain_list(speed_lines(speed, world_size))
    headings = ["part", "#time", "#share", *["#by rank"] * (len(speed.ranks) > 1), *["#predicted"] * bool(predicted)]
    return section("Where the time of a step went", text, drawn + text_table(headings, part_rows(speed, predicted)))


def _segments(seconds: Mapping[str, float]) -> list[Segment]:
    return [
        Segment(PART_KINDS[name], name.replace("_", " "), seconds[name], format_duration(seconds[name]))
        for name in PARTS
        if seconds.get(name, 0.0) > 0
    ]


def _compared(
    name: str, predicted: float, measured: float | None, show: Callable[[float], str]
) -> tuple[str, str, str, str]:
    difference = f"{measured / predicted - 1:+.1%}" if measured is not None and predicted > 0 else ""
    return name, show(predicted), "not known yet" if measured is None else show(measured), difference


def wall_time_section(report: Report) -> str:
    """Draw the wall time of all attempts by part; empty parts are omitted."""
    wall_s = report.time_s.total_s
    if wall_s <= 0 or report.goodput is None:
        return ""
    rows = []
    for name, seconds, took, share in wall_time_rows(report):
        shown = f"{took}, {share:.1%}"
        rows.append((name, render_bar([Segment("c-used", name, seconds, shown)], wall_s), shown))
    text = f"Goodput {report.goodput:.1%} of {format_duration(wall_s)}, counted from the first launch."
    return section("Wall time", text, bar_rows(rows))


MOST_LINES = 100
"""Number of recent changes, evaluations, checkpoints and warnings to show."""
MOST_CHARACTERS = 600
"""Longer lines are truncated. (trainspec itself does not write such lines.)"""
FOOTER = (
    "Reported by trainspec. MFU counts model FLOPs (for attention, only the causal half), relative to the named peak. "
    "Goodput is the fraction of the wall time since the first launch that was spent on steps that were kept."
)


def render_run_page(report: Report, composed: str = "", origin: PageOrigin | None = None) -> str:
    """Return the page of a finished or live run; `composed` is the text of its recipe."""
    goes_on = "; the run is in progress" if report.status in ALIVE else ""
    text = f"{report.recipe}: {status_line(report)}{goes_on}".removeprefix(": ")
    # Each tile is (name, value, detail).
    figures = [("steps", f"{report.steps:,}", f"of {report.max_steps:,}" if report.max_steps is not None else "")]
    if report.loss:
        figures.append(("loss, last", _loss(report.final_loss), _lowest(report.loss)))
    if report.evaluations:
        heldout = tuple((event.step, event.heldout_loss) for event in report.evaluations)
        figures.append(("held-out loss, last", _loss(heldout[-1][1]), _lowest(heldout)))
    if report.speed:
        figures.append((f"{report.speed.unit}/s", format_rate(report.speed.tokens_per_s), ""))
    if report.speed and report.speed.peak_flops:
        figures.append(
            ("MFU", f"{report.speed.mfu:.1%}", f"of {format_si(report.speed.peak_flops, 'FLOP/s')} per device")
        )
    if report.goodput is not None:
        figures.append(("goodput", f"{report.goodput:.1%}", ""))
        figures.append(("wall time", format_duration(report.time_s.total_s), ""))
    above = [heading(title_of(report), text), origin_line(origin), tiles(figures)]
    return render_page(title_of(report), "".join([*above, *_sections(report, composed)]), FOOTER)


def _sections(report: Report, composed: str) -> Iterator[str]:
    yield curves_section(report)
    # Draw the gradient norm and the learning rate in separate charts; empty if the run has neither.
    drawn = ""
    for name, curve in (("gradient norm", report.grad_norm), ("learning rate", report.lr)):
        if points := thin(_points(curve), LOSS_STRETCHES):
            drawn += render_curves([LineSeries("c-measure", name, points, len(points) <= MARKED_POINTS)], "step", name)
    yield (section("Gradient norm and learning rate", "", drawn) if drawn else "")
    if report.speed:
        yield step_time_section(report.speed, report.world_size or 1, report.predicted)
    if report.predicted:
        step_s = report.speed.step_time_s if report.speed else None
        rows = [
            _compared("step", report.predicted.step_time_s, step_s, format_duration),
            _compared(
                "peak memory of one device", report.predicted.peak_memory_bytes, report.peak_memory_bytes, format_bytes
            ),
        ]
        text = "Predicted by the plan, and measured."
        yield section("Predicted and measured", text, text_table(("", "#predicted", "#measured", "#difference"), rows))
    yield wall_time_section(report)
    yield verdicts_section(report.verdicts)
    yield _changes("Scheduler", ("#step", "what", "why"), scheduler_changes(report))
    yield _changes("Recoveries", ("#step", "what", "cost"), [describe_recovery(one) for one in report.recoveries])
    if lines := warning_lines(report):
        yield section("Warnings", _earlier(len(lines)), _newest(lines))
    evaluations = [f"step {event.step}: {describe_evaluation(event)}" for event in report.evaluations]
    yield _folded(heldout_title(report), evaluations)
    yield _folded("link changes", [describe_event(event) for event in report.link_changes])
    yield _folded("checkpoints", [describe_event(event) for event in report.checkpoints])
    if report.sample:
        written = shorten(f"{report.sample.prompt}{report.sample.text}", MOST_CHARACTERS)
        yield details(f"What the model writes (step {report.sample.step:,})", preformatted(written))
    facts = [text_row((name, shorten(value, MOST_CHARACTERS)), ("name",)) for name, value in facts_of(report)]
    yield section("The run", "", table(("", ""), facts))
    if composed:
        yield details("Recipe", preformatted(composed))


def _loss(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def _lowest(curve: Curve) -> str:
    """`lowest 1.2345, step 900`."""
    found = min(((value, step) for step, value in curve if value is not None), default=None)
    if found is None:
        return ""
    value, step = found
    return f"lowest {_loss(value)}, step {step:,}"


def _changes(title: str, headings: Sequence[str], changes: Sequence[RunChange]) -> str:
    if not changes:
        return ""
    rows = [
        text_row(
            (f"{one.step:,}", shorten(one.what, MOST_CHARACTERS), shorten(one.why, MOST_CHARACTERS)),
            ("number", "text", "text"),
        )
        for one in changes[-MOST_LINES:]
    ]
    return section(title, _earlier(len(changes)), table(headings, rows))


def _earlier(count: int) -> str:
    return f"The newest {MOST_LINES} of {count:,}." if count > MOST_LINES else ""


def _newest(lines: Sequence[str]) -> str:
    return plain_list([shorten(line, MOST_CHARACTERS) for line in lines[-MOST_LINES:]])


def _folded(title: str, lines: Sequence[str]) -> str:
    """Return a collapsed list; empty if there are no lines."""
    summary = f"{title[0].upper()}{title[1:]} ({len(lines):,})"
    return details(summary, note(_earlier(len(lines))) + _newest(lines)) if lines else ""
