"""The page of a run: its curves, where its time went, what slowed it, and what was predicted of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainspec_cli.core.units import format_duration, format_si
from trainspec_cli.report.changes import RunChange, describe_recovery
from trainspec_cli.report.collect import Curve, Report
from trainspec_cli.report.page.parts import (
    PageOrigin,
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
    tiles,
)
from trainspec_cli.report.run_charts import (
    curves_section,
    other_curves_section,
    prediction_section,
    step_time_section,
    wall_time_section,
)
from trainspec_cli.report.run_lines import (
    facts_of,
    heldout_title,
    scheduler_changes,
    standing_of,
    title_of,
    warning_lines,
)
from trainspec_cli.report.runs import ALIVE
from trainspec_cli.report.text import describe_evaluation, describe_event, format_units
from trainspec_cli.report.verdicts_page import verdicts_section
from trainspec_cli.run.folder.event_types.training import SampleEvent

MOST_LINES = 100
"""Changes, evaluations, checkpoints and warnings that are shown, the newest."""
MOST_CHARACTERS = 600
"""A line that is longer is cut off: only a stranger writes such lines."""
FOOTER = (
    "Reported by trainspec. MFU counts model FLOPs, attention over its causal half, over the peak that is named. "
    "Goodput is the part of the wall time, from the first launch on, in which steps were made that count."
)


def render_run_page(report: Report, composed: str = "", origin: PageOrigin | None = None) -> str:
    """Return the page of a run, finished or live; `composed` is the text of its recipe."""
    goes_on = "; the run goes on, and this is how it stood" if report.status in ALIVE else ""
    text = f"{report.recipe}: {standing_of(report)}{goes_on}".removeprefix(": ")
    above = [heading(title_of(report), text), origin_line(origin), tiles(list(_figures(report)))]
    return render_page(title_of(report), "".join([*above, *_sections(report, composed)]), FOOTER)


def _sections(report: Report, composed: str) -> Iterator[str]:
    yield curves_section(report)
    yield other_curves_section(report)
    if report.speed:
        yield step_time_section(report.speed, report.world_size or 1, report.predicted)
    if report.predicted:
        yield prediction_section(report, report.predicted)
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
        yield _sample(report.sample)
    facts = [text_row((name, shorten(value, MOST_CHARACTERS)), ("name",)) for name, value in facts_of(report)]
    yield section("The run", "", table(("", ""), facts))
    if composed:
        yield details("Recipe", preformatted(composed))


def _figures(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield the tiles: name, value, and what else there is to say."""
    yield "steps", f"{report.steps:,}", f"of {report.max_steps:,}" if report.max_steps is not None else ""
    if report.loss:
        yield "loss, last", _loss(report.final_loss), _lowest(report.loss)
    if report.evaluations:
        heldout = tuple((event.step, event.heldout_loss) for event in report.evaluations)
        yield "held-out loss, last", _loss(heldout[-1][1]), _lowest(heldout)
    if report.speed:
        yield f"{report.speed.unit}/s", format_units(report.speed.tokens_per_s), ""
    if report.speed and report.speed.peak_flops:
        yield "MFU", f"{report.speed.mfu:.1%}", f"of {format_si(report.speed.peak_flops, 'FLOP/s')} a device"
    if report.goodput is not None:
        yield "goodput", f"{report.goodput:.1%}", ""
        yield "wall time", format_duration(report.time_s.total_s), ""


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
    """A list that is closed at first; nothing where it is empty."""
    summary = f"{title[0].upper()}{title[1:]} ({len(lines):,})"
    return details(summary, note(_earlier(len(lines))) + _newest(lines)) if lines else ""


def _sample(sample: SampleEvent) -> str:
    written = shorten(f"{sample.prompt}{sample.text}", MOST_CHARACTERS)
    return details(f"What the model writes (step {sample.step:,})", preformatted(written))
