"""A Report for people: the summary at the end of a run, and the whole report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from operator import itemgetter

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table

from trainspec_cli.report.chart import render_chart
from trainspec_cli.report.collect import Curve, Report, RunSpeed
from trainspec_cli.report.kernels_text import describe_choice
from trainspec_cli.report.rich_text import Text
from trainspec_cli.report.text import (
    describe_directive,
    describe_evaluation,
    describe_event,
    describe_left_out,
    describe_memory,
    describe_speed,
)
from trainspec_cli.spec.canonical import ABSENT
from trainspec_cli.spec.results.prediction import LocalPrediction
from trainspec_cli.units import format_bytes, format_count, format_duration, format_si

BAR_CELLS = 24
SHOWN_LINES = 8
"""Of evaluations, checkpoints and warnings the newest are shown."""

UNSTEADY = 1.5
"""Steps of one run, which all do the same, differ by less on a machine of its own."""

LONG_WAIT = 0.05
"""Part of a step; what is read ahead in time takes less."""

Section = RenderableType | None
"""None: there is nothing to show."""


def render_summary(report: Report) -> RenderableType:
    """Show the end of a run: curve, held-out text, sample, speed."""
    newest = report.evaluations[-1:]
    return _stack(
        _chart(report.loss, "loss"),
        _lines(_heldout_title(report), [describe_evaluation(event) for event in newest]),
        _sample(report),
        _lines("speed", [_rate(report.speed)] if report.speed else []),
    )


def render_report(report: Report) -> RenderableType:
    """Show everything: how the run ended, curves, where the time went, evaluations, checkpoints, warnings."""
    return _stack(
        _head(report),
        _chart(report.loss, "loss"),
        _chart(report.grad_norm, "gradient norm", height=5),
        _speed(report.speed, report.world_size or 1, report.predicted) if report.speed else None,
        _lines(
            _heldout_title(report), [f"step {event.step}: {describe_evaluation(event)}" for event in report.evaluations]
        ),
        _wall_time(report),
        _lines("scheduler", _directives(report)),
        _lines("checkpoints", map(describe_event, report.checkpoints)),
        _lines("warnings", _warnings(report)),
        _sample(report),
    )


def _stack(*sections: Section) -> RenderableType:
    """Join sections with a blank line between them."""
    return Group(*(part for section in sections if section is not None for part in (section, "")))


def _head(report: Report) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(report):
        table.add_row(Text(name, style="bold"), Text(value))
    return table


def _facts(report: Report) -> Iterator[tuple[str, str]]:
    yield "run", report.path
    yield "recipe", report.recipe
    of = f" of {report.max_steps}" if report.max_steps is not None else ""
    code = f" (exit code {report.exit_code})" if report.exit_code is not None else ""
    yield "status", f"{report.status}{code}, {report.steps}{of} steps in {format_duration(report.elapsed_s)}"
    if len(report.start_steps) > 1:
        yield "resumed", f"from step {', '.join(map(str, report.start_steps[1:]))}"
    if report.params is not None:
        yield "model", f"{format_count(report.params)} parameters"
    if report.world_size is not None:
        yield "devices", f"{report.world_size} x {report.device_name}"
    if report.peak_memory_bytes is not None:
        beside = f" (predicted {format_bytes(report.predicted.peak_memory_bytes)})" if report.predicted else ""
        yield "memory", f"{format_bytes(report.peak_memory_bytes)} at most, on one device{beside}"
    if report.kernels.changed or report.kernel_table is not None:
        yield "kernels", describe_choice(report.kernels, report.kernel_table)
    if report.weights_sha256 is not None:
        yield "weights", f"sha256 {report.weights_sha256}"


def _chart(curve: Curve, title: str, height: int = 10) -> Section:
    points = [(float(step), value) for step, value in curve if value is not None]
    return Text(render_chart(points, title=title, height=height), no_wrap=True) if len(points) > 1 else None


def _lines(title: str, lines: Iterable[str]) -> Section:
    every = list(lines)
    if not every:
        return None
    shown = every[-SHOWN_LINES:]
    earlier = [f"({len(every) - len(shown)} earlier)"] if len(every) > len(shown) else []
    return Group(Text(title, style="bold"), Padding(Text("\n".join([*earlier, *shown])), (0, 0, 0, 2), expand=False))


def _heldout_title(report: Report) -> str:
    text = all(event.heldout_bits_per_byte is not ABSENT for event in report.evaluations)
    return "held-out text" if text else "held-out samples"


def _sample(report: Report) -> Section:
    if report.sample is None:
        return None
    written = Text.assemble((report.sample.prompt, "bold"), report.sample.text)
    title = Text(f"what the model writes (step {report.sample.step})", style="bold")
    return Group(title, Padding(written, (0, 0, 0, 2), expand=False))


def _directives(report: Report) -> list[str]:
    achieved = {(event.group, event.number): event for event in report.achieved}
    given = [
        (event.step, describe_directive(event, achieved.get((event.group, event.number))))
        for event in report.directives
    ]
    given += [(event.step, describe_memory(event)) for event in report.memory]
    of_nodes = {event.number: event for event in report.left_out_achieved}
    given += [(event.step, describe_left_out(event, of_nodes.get(event.number))) for event in report.left_out]
    return [line for _, line in sorted(given, key=itemgetter(0))]


def _warnings(report: Report) -> list[str]:
    """Return the warnings; one that several ranks report takes one line."""
    by_text: dict[str, list[int]] = {}
    for event in report.warnings:
        by_text.setdefault(f"step {event.step}: {event.message}", []).append(event.rank)
    lines = [f"{text} (rank {_join(ranks)})" for text, ranks in by_text.items()]
    missing = [f"no events of rank {_join(report.missing_ranks)}"] if report.missing_ranks else []
    return lines + missing


def _join(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN_LINES} more" if len(numbers) > SHOWN_LINES else ""
    return ", ".join(map(str, numbers[:SHOWN_LINES])) + more


def _speed(speed: RunSpeed, world_size: int, predicted: LocalPrediction | None) -> RenderableType:
    peak = f"({world_size} x {format_si(speed.peak_flops, 'FLOP/s')}, the {speed.peak_source})"
    lines = [
        _rate(speed),
        f"MFU = {speed.unit}/s x {format_si(speed.flops_per_token, 'FLOP')} a {speed.unit.removesuffix('s')} / {peak}",
        f"over steps {speed.first_step}-{speed.last_step}{_left_out(speed)}",
        *_unsteady(speed),
        *_waiting(speed),
    ]
    return Group(
        Text("where the time went", style="bold"),
        Padding(Group(*map(Text, lines), "", _parts(speed, predicted)), (0, 2)),
    )


def _wall_time(report: Report) -> Section:
    """Show where the time of all attempts went, as bars; buckets without any are left out."""
    wall_s = report.time_s.total_s
    if not wall_s or report.goodput is None:
        return None
    table = Table.grid(padding=(0, 2))
    for bucket in fields(report.time_s):
        name, seconds = bucket.name, getattr(report.time_s, bucket.name)
        if seconds > 0:
            share = seconds / wall_s
            bar = "█" * round(share * BAR_CELLS)
            table.add_row(name.replace("_", " "), format_duration(seconds), f"{share:.1%}", bar)
    title = f"goodput {report.goodput:.1%}, of {format_duration(wall_s)} from the first launch on"
    return Group(Text(title, style="bold"), Padding(table, (0, 2)))


def _unsteady(speed: RunSpeed) -> Iterator[str]:
    """A prediction knows of the load that there was when this machine was probed, not of what came later."""
    quick_s, slow_s = speed.usual_s
    if slow_s > UNSTEADY * quick_s:
        usual = f"{format_duration(quick_s)} to {format_duration(slow_s)} (eight in ten)"
        yield f"steps took {usual}: something else was at work on this machine, which no prediction foresees"


def _waiting(speed: RunSpeed) -> Iterator[str]:
    """Reading ahead hides all that takes less than a step."""
    share = next(part.share for part in speed.parts if part.name == "data_wait")
    if share > LONG_WAIT:
        yield (
            f"steps waited {share:.0%} of their time for data: reading a batch takes longer than a step; what helps is "
            + ("a faster or local disk" if speed.unit == "tokens" else "a faster disk, or more CPU cores to read with")
        )


def _rate(speed: RunSpeed) -> str:
    return describe_speed(speed.tokens_per_s, speed.mfu, speed.unit)


def _left_out(speed: RunSpeed) -> str:
    steps = speed.left_out_steps
    if not steps:
        return ""
    return f"; steps {steps[0]}-{steps[-1]}, which compile and allocate, are left out"


def _parts(speed: RunSpeed, predicted: LocalPrediction | None) -> Table:
    """Show the parts of the mean step with bars, over several ranks also the least and the greatest, and the predicted
    times."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("part of a step")
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("")
    if len(speed.ranks) > 1:
        table.add_column("by rank", justify="right")
    if predicted:
        table.add_column("predicted", justify="right")
    for part in speed.parts:
        bar = "█" * round(part.share * BAR_CELLS)
        row = [part.name.replace("_", " "), format_duration(part.mean_s), f"{part.share:.1%}", bar]
        if len(speed.ranks) > 1:
            row.append(f"{format_duration(part.min_s)} - {format_duration(part.max_s)}")
        if predicted:
            row.append(format_duration(predicted.time_s.get(part.name, 0.0)))
        table.add_row(*row)
    whole = ["whole step", format_duration(speed.step_time_s), "100.0%"]
    if predicted:
        whole += [""] * (len(table.columns) - 1 - len(whole)) + [format_duration(predicted.step_time_s)]
    table.add_row(*whole, style="bold")
    return table
