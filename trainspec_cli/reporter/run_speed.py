"""Compute where the time of a run's steps went: a rank's events -> starts and steps -> means over steps and ranks ->
lines.

A step event records the duration in seconds of every part (`PARTS` in run/folder/event_types/events.py), measured by
the rank's clock (engine/observe/clock.py). This module averages them and builds the rows that the terminal and the page
show. The plan's prediction for the same step comes from planner/time/step.py and is shown by plan/text.py.

Steps are kept as columns of numbers, which take a few hundred bytes per step. The events themselves are dropped after
reading."""

from __future__ import annotations

import math
from array import array
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import eq
from typing import TypeVar

from trainspec_cli.core.printable import format_duration, format_si
from trainspec_cli.recipe.records import Absent
from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.reporter.plan.labels import format_rate
from trainspec_cli.run.folder.accounting import Throughput, throughput_of
from trainspec_cli.run.folder.event_types.events import (
    PARTS,
    CheckpointEvent,
    EvalEvent,
    Event,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from trainspec_cli.run.folder.files import StepColumns

BesideSteps = EvalEvent | CheckpointEvent | SampleEvent
Kind = TypeVar("Kind", EvalEvent, CheckpointEvent, SampleEvent)
FIGURES = ("loss", "grad_norm", "lr", "skipped", "step_time_s", "units", "exchange_s", "exposed_s", *PARTS)
"""The columns of numbers that are kept. An unknown loss or a missing exchange is NaN."""


def _row(event: StepEvent) -> tuple[float, ...]:
    parts_s = event.time_s
    return (
        *(math.nan if one is None else one for one in (event.loss, event.grad_norm)),
        math.nan if event.lr is None or isinstance(event.lr, Absent) else event.lr,
        *(event.skipped, event.step_time_s, event.units),
        *(math.nan if isinstance(one, Absent) else one for one in (event.exchange_s, event.exposed_s)),
        *(parts_s.get(name, 0.0) for name in PARTS),
    )


@dataclass
class Start:
    """A rank's events from one start to the next."""

    begin: StartEvent | None
    """The start event; None if it was lost."""
    steps: StepColumns = field(default_factory=lambda: StepColumns(*FIGURES))
    others: list[BesideSteps] = field(default_factory=list)

    def forget_beyond(self, step: int) -> None:
        self.steps.forget_beyond(step)
        self.others = [event for event in self.others if event.step <= step]

    def rows_of(self, wanted_steps: Container[int]) -> Sequence[int]:
        """Return the row indices of the wanted steps."""
        return array("q", (row for row, step in enumerate(self.steps.steps) if step in wanted_steps))


@dataclass
class History:
    starts: list[Start] = field(default_factory=list)
    warnings: list[WarningEvent] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0
    """Unix times of the first and the last event."""

    def add(self, event: Event) -> None:
        """Add the next event to its start. A resume continues from a checkpoint. Steps of earlier starts after that
        checkpoint are repeated, so they are dropped here."""
        self.last_time = event.time
        self.first_time = self.first_time or event.time
        if isinstance(event, StartEvent):
            for earlier in self.starts:
                # Drop the steps that the resumed run repeats, because they would otherwise count twice.
                earlier.forget_beyond(event.step)
            self.starts.append(Start(event))
        elif isinstance(event, WarningEvent):
            self.warnings.append(event)
        else:
            if not self.starts:
                self.starts.append(Start(None))
            if isinstance(event, StepEvent):
                self.starts[-1].steps.add(event.step, *_row(event))
            elif isinstance(event, BesideSteps):
                self.starts[-1].others.append(event)

    def column(self, name: str) -> tuple[array[int], array[float]]:
        """Return one column for the steps of all starts, as (steps, values)."""
        steps = array("q")
        values = array("d")
        for start in self.starts:
            steps.extend(start.steps.steps)
            values.extend(start.steps[name])
        return steps, values

    @property
    def last_working_start(self) -> Start | None:
        """Return the newest start that completed a step."""
        return next((start for start in reversed(self.starts) if len(start.steps)), None)

    @property
    def begin(self) -> StartEvent | None:
        return self.starts[-1].begin if self.starts else None

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [event for start in self.starts for event in start.others if isinstance(event, kind)]


@dataclass(frozen=True)
class PartTime:
    name: str
    mean_s: float
    """Mean time over steps and ranks, in seconds."""
    share: float
    """Fraction of the mean step."""
    min_s: float
    max_s: float
    """Smallest and largest of the ranks' means."""


@dataclass(frozen=True)
class ExchangeShare:
    """Exchanges between ranks that overlap with computation, as means over steps and ranks."""

    seconds: float
    """Seconds per step during which an exchange was running."""
    exposed_s: float
    """The part of this time during which nothing was computed."""


@dataclass(frozen=True)
class RunSpeed:
    """The speed over the steps of the last start, except for the first ones, which include compilation and
    allocation."""

    tokens_per_s: float
    """Rate in `unit`: samples per second for images and volumes."""
    mfu: float
    peak_flops: float
    """Peak FLOP/s of one device; `peak_source` states where the value comes from."""
    peak_source: str
    flops_per_token: float
    first_step: int
    last_step: int
    left_out_steps: tuple[int, ...]
    step_time_s: float
    """Mean step time over steps and ranks, which is the sum of the parts."""
    usual_s: tuple[float, float]
    """The range of the middle 80% of the first rank's steps, excluding steps that wrote a checkpoint."""
    parts: tuple[PartTime, ...]
    ranks: tuple[int, ...]
    """The ranks that the parts are averaged over."""
    unit: str = "tokens"
    exchange: ExchangeShare | None = None
    """The exchanges between ranks; None if none overlapped with computation."""


class SpeedMeter:
    """Reads the ranks one after another, starting with the first, and keeps only means."""

    def __init__(self, first: History):
        self._start, self._throughput = first.last_working_start, Throughput(0.0, 0.0, 0, 0)
        self._wanted_steps: Container[int] = ()
        self._means_s: dict[int, dict[str, float]] = {}
        self._exchanges_s: list[tuple[float, float]] = []
        self._exchanging_steps = 0
        if self._start is not None and (begin := self._start.begin) is not None:
            self._throughput = throughput_of(
                self._start.steps["step_time_s"],
                self._start.steps["units"],
                flops_per_token=begin.flops_per_token,
                peak_flops=begin.peak_flops,
                world_size=begin.world_size,
            )
            # A range takes little memory even for a long run. Only a run with gaps needs a set.
            steps = self._start.steps.steps[self._throughput.left_out :]
            run = range(steps[0], steps[-1] + 1) if steps else range(0)
            self._wanted_steps = run if len(run) == len(steps) and all(map(eq, run, steps)) else set(steps)

    def add(self, rank: int, history: History) -> None:
        """Add the steps that this rank has in common with the first one."""
        start = history.last_working_start
        rows = start.rows_of(self._wanted_steps) if start else []
        if start is None or not rows:
            return
        # Naive summation of a million small parts would lose precision.
        self._means_s[rank] = {name: _sum(start.steps[name], rows) / len(rows) for name in PARTS}
        exchange_s = start.steps["exchange_s"]
        exposed_s = start.steps["exposed_s"]
        seen = [row for row in rows if not math.isnan(exchange_s[row]) and not math.isnan(exposed_s[row])]
        self._exchanging_steps += len(seen)
        self._exchanges_s.append((_sum(exchange_s, seen), _sum(exposed_s, seen)))

    @property
    def speed(self) -> RunSpeed | None:
        """Return the speed; None before the first step."""
        start = self._start
        if start is None or start.begin is None:
            return None
        by_part = {name: [mean[name] for mean in self._means_s.values()] for name in PARTS}
        mean_s = {name: math.fsum(values) / len(values) for name, values in by_part.items()}
        whole_s = math.fsum(mean_s.values())
        parts = tuple(
            PartTime(name, mean_s[name], mean_s[name] / whole_s if whole_s else 0.0, min(values), max(values))
            for name, values in by_part.items()
        )
        begin = start.begin
        left_out = self._throughput.left_out
        steady = range(left_out, len(start.steps))
        # These are the 10th and 90th percentiles.
        checkpoint_s = start.steps["checkpoint"]
        step_time_s = start.steps["step_time_s"]
        times = sorted(step_time_s[row] for row in steady if not checkpoint_s[row])
        times = times or sorted(step_time_s[row] for row in steady)
        exchange = None
        if self._exchanging_steps:
            totals_s = (math.fsum(seconds) for seconds in zip(*self._exchanges_s, strict=True))
            exchange = ExchangeShare(*(total_s / self._exchanging_steps for total_s in totals_s))
        return RunSpeed(
            tokens_per_s=self._throughput.tokens_per_s,
            mfu=self._throughput.mfu,
            peak_flops=begin.peak_flops,
            peak_source=begin.peak_source,
            flops_per_token=begin.flops_per_token,
            first_step=start.steps.steps[steady[0]],
            last_step=start.steps.steps[-1],
            left_out_steps=tuple(start.steps.steps[:left_out]),
            step_time_s=math.fsum(part.mean_s for part in parts),
            usual_s=(times[len(times) // 10], times[len(times) * 9 // 10]),
            parts=parts,
            ranks=tuple(self._means_s),
            unit=begin.unit,
            exchange=exchange,
        )


def _sum(column: Sequence[float], rows: Iterable[int]) -> float:
    return math.fsum(column[row] for row in rows)


# The speed and the parts of a step, as lines and rows for the terminal and the page.


STEPS = "steps"
"""The unit for a user command, whose tokens and samples are unknown."""
UNSTEADY = 1.5
"""On a machine without other load, the durations of steps with the same work differ by less than this factor."""
LONG_WAIT = 0.05
"""If data is prefetched in time, waiting for data takes less than this fraction of a step."""


def describe_speed(units_per_s: float, mfu: float, unit: str = "tokens") -> str:
    """`2,810 tokens/s · 41.0% MFU`, or `2.81 samples/s` with decimals, because images and volumes may be slow. A speed
    in steps per second has no MFU."""
    if unit == STEPS:
        return f"{format_rate(units_per_s)} {unit}/s"
    return f"{format_rate(units_per_s)} {unit}/s · {mfu:.1%} MFU"


def speed_lines(speed: RunSpeed, world_size: int) -> list[str]:
    """Return lines that state the speed, how MFU is computed, which steps were averaged, and what is unusual about
    them."""
    steps = speed.left_out_steps
    left_out = (
        f"; steps {steps[0]}-{steps[-1]}, which include compilation and allocation, are left out" if steps else ""
    )
    over = f"over steps {speed.first_step}-{speed.last_step}{left_out}"
    if speed.unit == STEPS:
        return [describe_speed(speed.tokens_per_s, speed.mfu, speed.unit), over]
    flops = f"{format_si(speed.flops_per_token, 'FLOP')} per {speed.unit.removesuffix('s')}"
    peak = f"({world_size} x {format_si(speed.peak_flops, 'FLOP/s')}, the {speed.peak_source})"
    lines = [
        describe_speed(speed.tokens_per_s, speed.mfu, speed.unit),
        f"MFU = {speed.unit}/s x {flops} / {peak}",
        over,
    ]
    quick_s, slow_s = speed.usual_s
    # A prediction takes into account the load on the machine during the probe, but not any later load.
    if slow_s > UNSTEADY * quick_s:
        usual = f"{format_duration(quick_s)} to {format_duration(slow_s)} (80% of the steps)"
        lines.append(f"steps took {usual}: other work slowed this machine; predictions do not include it")
    # Prefetching hides reads that take less than a step.
    waited = next(part.share for part in speed.parts if part.name == "data_wait")
    if waited > LONG_WAIT:
        disk = "a faster or local disk" if speed.unit == "tokens" else "a faster disk, or more CPU cores for reading"
        why = "reading a batch takes longer than a step; use"
        lines.append(f"steps spent {waited:.0%} of their time waiting for data: {why} {disk}")
    if speed.exchange and speed.exchange.seconds:
        took = format_duration(speed.exchange.seconds)
        exposed = speed.exchange.exposed_s / speed.exchange.seconds
        lines.append(f"ranks exchanged data for {took} per step, {exposed:.0%} of it while nothing was computed")
    return lines


def part_rows(speed: RunSpeed, predicted: LocalPrediction | None) -> Iterator[list[str]]:
    """Yield (part, time, fraction) for each part of the mean step and for the total. With several ranks, the range
    follows, and so does the predicted time if it is known."""
    by_rank = len(speed.ranks) > 1
    for part in speed.parts:
        row = [part.name.replace("_", " "), format_duration(part.mean_s), f"{part.share:.1%}"]
        row += [f"{format_duration(part.min_s)} - {format_duration(part.max_s)}"] if by_rank else []
        yield row + ([format_duration(predicted.time_s.get(part.name, 0.0))] if predicted else [])
    whole = ["whole step", format_duration(speed.step_time_s), "100.0%", *([""] if by_rank else [])]
    yield whole + ([format_duration(predicted.step_time_s)] if predicted else [])
