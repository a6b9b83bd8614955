"""Lines and facts of a Report, the same in a terminal and on a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from trainspec_cli.core.units import format_bytes, format_count, format_duration, format_si
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.report.changes import (
    RunChange,
    describe_buckets,
    describe_directive,
    describe_left_out,
    describe_memory,
    without_old_advice,
)
from trainspec_cli.report.collect import Report
from trainspec_cli.report.kernels_text import describe_choice
from trainspec_cli.report.run_speed import RunSpeed
from trainspec_cli.report.text import STEPS, describe_speed

SHOWN_RANKS = 8
"""Ranks that are listed one by one."""

UNSTEADY = 1.5
"""Steps of one run, which all do the same, differ by less on a machine of its own."""

LONG_WAIT = 0.05
"""Part of a step; what is read ahead in time takes less."""


def title_of(report: Report) -> str:
    """`baseline: done`; of a run without a name its folder."""
    return f"{report.name or report.path}: {report.status}"


def standing_of(report: Report) -> str:
    """`stopped (exit code 6), 20 of 20 steps in 1 min 30 s`."""
    of = f" of {report.max_steps}" if report.max_steps is not None else ""
    code = f" (exit code {report.exit_code})" if report.exit_code is not None else ""
    return f"{report.status}{code}, {report.steps}{of} steps in {format_duration(report.elapsed_s)}"


def facts_of(report: Report) -> Iterator[tuple[str, str]]:
    yield "run", report.path
    yield "recipe", report.recipe
    yield "status", standing_of(report)
    if report.reason:
        yield "reason", report.reason
    if report.hint:
        yield "hint", report.hint
    if len(report.start_steps) > 1:
        yield "resumed", f"from step {', '.join(map(str, report.start_steps[1:]))}"
    if report.params:
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


def heldout_title(report: Report) -> str:
    text = all(event.heldout_bits_per_byte is not ABSENT for event in report.evaluations)
    return "held-out text" if text else "held-out samples"


def scheduler_changes(report: Report) -> list[RunChange]:
    """Return what the scheduler changed, or advises now, with what came of it, by step."""
    achieved = {(event.group, event.number): event for event in report.achieved}
    of_nodes = {event.number: event for event in report.left_out_achieved}
    directives = without_old_advice(report.directives)
    changes = [describe_directive(event, achieved.get((event.group, event.number))) for event in directives]
    changes += map(describe_buckets, report.buckets)
    changes += map(describe_memory, report.memory)
    changes += [describe_left_out(event, of_nodes.get(event.number)) for event in report.left_out]
    return sorted(changes, key=attrgetter("step"))


def warning_lines(report: Report) -> list[str]:
    """Return the warnings; one that several ranks report takes one line."""
    by_text: dict[str, list[int]] = {}
    for event in report.warnings:
        by_text.setdefault(f"step {event.step}: {event.message}", []).append(event.rank)
    lines = [f"{text} (rank {_join(ranks)})" for text, ranks in by_text.items()]
    missing = [f"no events of rank {_join(report.missing_ranks)}"] if report.missing_ranks else []
    return lines + missing


def _join(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - SHOWN_RANKS} more" if len(numbers) > SHOWN_RANKS else ""
    return ", ".join(map(str, numbers[:SHOWN_RANKS])) + more


def speed_lines(speed: RunSpeed, world_size: int) -> list[str]:
    """Return the speed, how MFU is reckoned, the steps that it is taken over, and what is unusual about them."""
    if speed.unit == STEPS:
        return [speed_line(speed), f"over steps {speed.first_step}-{speed.last_step}{_left_out(speed)}"]
    peak = f"({world_size} x {format_si(speed.peak_flops, 'FLOP/s')}, the {speed.peak_source})"
    return [
        speed_line(speed),
        f"MFU = {speed.unit}/s x {format_si(speed.flops_per_token, 'FLOP')} a {speed.unit.removesuffix('s')} / {peak}",
        f"over steps {speed.first_step}-{speed.last_step}{_left_out(speed)}",
        *_unsteady(speed),
        *_waiting(speed),
        *_exchanges(speed),
    ]


def speed_line(speed: RunSpeed) -> str:
    return describe_speed(speed.tokens_per_s, speed.mfu, speed.unit)


def _unsteady(speed: RunSpeed) -> Iterator[str]:
    """A prediction knows of the load that there was when this machine was probed, not of what came later."""
    quick_s, slow_s = speed.usual_s
    if slow_s > UNSTEADY * quick_s:
        usual = f"{format_duration(quick_s)} to {format_duration(slow_s)} (eight in ten)"
        yield f"steps took {usual}: something else was at work on this machine, which no prediction foresees"


def _exchanges(speed: RunSpeed) -> Iterator[str]:
    if speed.exchange and speed.exchange.seconds:
        took, exposed = speed.exchange.seconds, speed.exchange.exposed_s / speed.exchange.seconds
        yield f"ranks exchanged for {format_duration(took)} a step, {exposed:.0%} of it while nothing was computed"


def _waiting(speed: RunSpeed) -> Iterator[str]:
    """Reading ahead hides all that takes less than a step."""
    share = next(part.share for part in speed.parts if part.name == "data_wait")
    if share > LONG_WAIT:
        yield (
            f"steps waited {share:.0%} of their time for data: reading a batch takes longer than a step; what helps is "
            + ("a faster or local disk" if speed.unit == "tokens" else "a faster disk, or more CPU cores to read with")
        )


def _left_out(speed: RunSpeed) -> str:
    steps = speed.left_out_steps
    if not steps:
        return ""
    return f"; steps {steps[0]}-{steps[-1]}, which compile and allocate, are left out"
