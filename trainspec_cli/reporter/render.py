"""Render a Report: the summary at the end of a run, and the full report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from trainspec_cli.core.printable import format_bytes, format_duration
from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.reporter.changes import describe_recovery
from trainspec_cli.reporter.chart import render_chart
from trainspec_cli.reporter.collect import Curve, Report
from trainspec_cli.reporter.console import Text
from trainspec_cli.reporter.run_speed import STEPS, RunSpeed, describe_speed, part_rows, speed_lines
from trainspec_cli.reporter.text import (
    describe_evaluation,
    describe_event,
    describe_ranks,
    facts_of,
    format_bandwidth,
    heldout_title,
    scheduler_changes,
    wall_time_rows,
    warning_lines,
)
from trainspec_cli.reporter.verdicts import describe_verdict

BAR_CELLS = 24
SHOWN_LINES = 8
"""Number of recent evaluations, checkpoints and warnings to show."""

Section = RenderableType | None
"""A section of the report; None if there is nothing to show."""


def render_summary(report: Report) -> RenderableType:
    """Show how a run ended, with its curve, held-out loss, generated sample and speed."""
    newest = report.evaluations[-1:]
    return _stack(
        _chart(report.loss, "loss"),
        _lines(heldout_title(report), [describe_evaluation(event) for event in newest]),
        _sample(report),
        _lines(
            "speed",
            [describe_speed(report.speed.tokens_per_s, report.speed.mfu, report.speed.unit)] if report.speed else [],
        ),
    )


def render_report(report: Report) -> RenderableType:
    """Show everything: how the run ended, curves, where the time went, evaluations, checkpoints and warnings."""
    table = Table.grid(padding=(0, 2))
    for name, value in facts_of(report):
        table.add_row(Text(name, style="bold"), Text(value))
    return _stack(
        table,
        _chart(report.loss, "loss"),
        _chart(report.grad_norm, "gradient norm", height=5),
        _speed(report.speed, report.world_size or 1, report.predicted) if report.speed else None,
        _lines(
            heldout_title(report), [f"step {event.step}: {describe_evaluation(event)}" for event in report.evaluations]
        ),
        _wall_time(report),
        _lines("diagnosis", map(describe_verdict, report.verdicts[:SHOWN_LINES])),
        _lines("scheduler", (change.line for change in scheduler_changes(report))),
        _lines("recoveries", (describe_recovery(one).line for one in report.recoveries)),
        _links(report),
        _lines("link changes", map(describe_event, report.link_changes)),
        _lines("checkpoints", map(describe_event, report.checkpoints)),
        _lines("warnings", warning_lines(report)),
        _sample(report),
    )


def _stack(*sections: Section) -> RenderableType:
    """Join sections, separated by blank lines."""
    return Group(*(part for section in sections if section is not None for part in (section, "")))


def _chart(curve: Curve, title: str, height: int = 10) -> Section:
    if sum(value is not None for _, value in curve) < 2:
        return None
    return Text(render_chart(curve, title=title, height=height), no_wrap=True)


def _lines(title: str, lines: Iterable[str]) -> Section:
    every = list(lines)
    if not every:
        return None
    shown = every[-SHOWN_LINES:]
    earlier = [f"({len(every) - len(shown)} earlier)"] if len(every) > len(shown) else []
    return Group(Text(title, style="bold"), Padding(Text("\n".join([*earlier, *shown])), (0, 0, 0, 2), expand=False))


def _sample(report: Report) -> Section:
    if report.sample is None:
        return None
    written = Text.assemble((report.sample.prompt, "bold"), report.sample.text)
    title = Text(f"what the model writes (step {report.sample.step})", style="bold")
    return Group(title, Padding(written, (0, 0, 0, 2), expand=False))


def _links(report: Report) -> Section:
    """Show the slowest link of each axis."""
    if not report.links:
        return None
    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for name in ("axis", "slowest ranks", "speed", "noise", "planned", "at once", "wait for"):
        justify: Literal["left", "right"] = "left" if name in ("axis", "slowest ranks") else "right"
        table.add_column(name, justify=justify, header_style="dim", no_wrap=True)
    for link in report.links:
        planned = link.planned_bytes_per_s
        of = f" (of {link.links:,})" if link.links > 1 else ""
        table.add_row(
            link.axis,
            f"{describe_ranks(link.ranks).partition(' ')[2]}{of}",
            format_bandwidth(link.bytes_per_s),
            f"{link.noise:.0%}",
            format_bandwidth(planned) if isinstance(planned, float) else "",
            format_bytes(link.sent_bytes),
            f"{format_duration(link.waited_s)}, rank {link.last_rank}",
        )
    return Group(Text("links", style="bold"), Padding(table, (0, 0, 0, 2), expand=False))


def _speed(speed: RunSpeed, world_size: int, predicted: LocalPrediction | None) -> RenderableType:
    if speed.unit == STEPS:
        return Group(Text("speed", style="bold"), Padding(Group(*map(Text, speed_lines(speed, world_size))), (0, 2)))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    headings = ["#by rank"] * (len(speed.ranks) > 1) + ["#predicted"] * (predicted is not None)
    for heading in ("part of a step", "#time", "#share", "", *headings):
        table.add_column(heading.lstrip("#"), justify="right" if heading.startswith("#") else "left")
    *parts, whole = part_rows(speed, predicted)
    for part, row in zip(speed.parts, parts, strict=True):
        table.add_row(*row[:3], "█" * round(part.share * BAR_CELLS), *row[3:])
    table.add_row(*whole[:3], "", *whole[3:], style="bold")
    return Group(
        Text("where the time went", style="bold"),
        Padding(Group(*map(Text, speed_lines(speed, world_size)), "", table), (0, 2)),
    )


def _wall_time(report: Report) -> Section:
    """Show the wall time of all attempts by part, as bars."""
    if not report.time_s.total_s or report.goodput is None:
        return None
    table = Table.grid(padding=(0, 2))
    for name, _, took, share in wall_time_rows(report):
        table.add_row(name, took, f"{share:.1%}", "█" * round(share * BAR_CELLS))
    title = f"goodput {report.goodput:.1%} of {format_duration(report.time_s.total_s)}, counted from the first launch"
    return Group(Text(title, style="bold"), Padding(table, (0, 2)))
