"""A run folder -> a Report: plain data, for people (`render`) and for programs (`--json`)."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from trainspec_cli.reporter.runs import name_of, status_of
from trainspec_cli.rundir.accounting import Recovery, WallTime, account, measure_throughput, read_recoveries
from trainspec_cli.rundir.event_types.decisions import (
    AchievedEvent,
    BucketsEvent,
    DirectiveEvent,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
)
from trainspec_cli.rundir.event_types.event import PARTS, Event
from trainspec_cli.rundir.event_types.observed import LinkEvent, LinkRate, LinksEvent
from trainspec_cli.rundir.event_types.training import (
    CheckpointEvent,
    EvalEvent,
    SampleEvent,
    StartEvent,
    StepEvent,
    WarningEvent,
)
from trainspec_cli.rundir.events import read_log, read_sound
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_plan_outline, read_result, read_run_record
from trainspec_cli.spec.canonical import Absent, from_plain
from trainspec_cli.spec.json_text import finite_or_none
from trainspec_cli.spec.recipe.kernels import KernelSpec, KernelTable
from trainspec_cli.spec.results.prediction import LocalPrediction
from trainspec_cli.spec.results.verdict import RunVerdict

Curve = tuple[tuple[int, float | None], ...]
"""(step, value); None where the value was not finite."""
BesideSteps = EvalEvent | CheckpointEvent | SampleEvent
Kind = TypeVar("Kind", EvalEvent, CheckpointEvent, SampleEvent)


@dataclass(frozen=True)
class PartTime:
    name: str
    mean_s: float
    """Over steps and ranks."""
    share: float
    """Fraction of the whole step."""
    min_s: float
    max_s: float
    """The ranks' own means: the least and the greatest."""


@dataclass(frozen=True)
class ExchangeShare:
    """Exchanges between ranks, where some went on beside the computation: means over steps and ranks."""

    seconds: float
    """A step in which an exchange went on."""
    exposed_s: float
    """The part of these in which nothing was computed."""


@dataclass(frozen=True)
class RunSpeed:
    """Taken over the steps of the last start, without the first, which compile and allocate."""

    tokens_per_s: float
    """Rate in `unit`: samples a second for images and volumes."""
    mfu: float
    peak_flops: float
    """Peak of one device; `peak_source` says how it is known."""
    peak_source: str
    flops_per_token: float
    first_step: int
    last_step: int
    left_out_steps: tuple[int, ...]
    step_time_s: float
    """Mean over steps and ranks; the parts sum to it."""
    usual_s: tuple[float, float]
    """Bounds of eight in ten of the first rank's steps, those that wrote a checkpoint left out."""
    parts: tuple[PartTime, ...]
    ranks: tuple[int, ...]
    """Ranks whose events the parts are taken from."""
    unit: str = "tokens"
    exchange: ExchangeShare | None = None
    """None where no exchange went on beside the computation."""


@dataclass(frozen=True)
class Report:
    path: str
    recipe: str
    status: str
    """done, stopped, failed, running, queued, made (never started), or killed (ended without a result)."""
    exit_code: int | None
    steps: int
    max_steps: int | None
    elapsed_s: float
    """Time from the first event to the last; pauses between a stop and a resume count."""
    start_steps: tuple[int, ...]
    """Steps at which workers started: 0, and the step from which each resume went on."""
    world_size: int | None
    device_name: str
    params: int | None
    final_loss: float | None
    peak_memory_bytes: int | None
    weights_sha256: str | None
    speed: RunSpeed | None
    """None before a step was made."""
    predicted: LocalPrediction | None
    """The plan's prediction; None where it has none."""
    loss: Curve
    grad_norm: Curve
    skipped_steps: tuple[int, ...]
    """Updates left out because they were not finite."""
    evaluations: tuple[EvalEvent, ...]
    checkpoints: tuple[CheckpointEvent, ...]
    """All that were written; older ones may have been removed since."""
    sample: SampleEvent | None
    warnings: tuple[WarningEvent, ...]
    missing_ranks: tuple[int, ...]
    """Ranks that left no events."""
    directives: tuple[DirectiveEvent, ...] = ()
    """Changes that the scheduler made or advised."""
    achieved: tuple[AchievedEvent, ...] = ()
    """Results of these changes: each names the number, and the replica group, of its directive."""
    buckets: tuple[BucketsEvent, ...] = ()
    """Sizes of buckets that the run has found."""
    memory: tuple[MemoryEvent, ...] = ()
    """Changes that were made because memory ran out."""
    left_out: tuple[NodesEvent, ...] = ()
    """Nodes that were left out, or would be."""
    left_out_achieved: tuple[NodesAchievedEvent, ...] = ()
    """Results of leaving them out, by number."""
    links: tuple[LinkRate, ...] = ()
    """The slowest link of each axis, as it was last written down."""
    link_changes: tuple[LinkEvent, ...] = ()
    """Links that have become faster or slower."""
    time_s: WallTime = field(default_factory=WallTime)
    """The parts of the wall time of all attempts."""
    goodput: float | None = None
    """The productive part of it."""
    verdicts: tuple[RunVerdict, ...] = ()
    """Verdicts on what slows the run, heaviest first."""
    kernels: KernelSpec = field(default_factory=KernelSpec)
    """The backend that computed each operation."""
    kernel_table: KernelTable | None = None
    """Measurements of `kernels=auto`; None where nothing was measured."""
    name: str = ""
    """As `run.name` says."""
    recoveries: tuple[Recovery, ...] = ()
    """What each failure has cost."""


def collect(root: Path | str, *, running: bool = False, queued: bool = False) -> Report:
    """Read what is there; a run that is still going, or was cut short, gives what it has so far."""
    run = RunDir(root)
    events = list(read_log(run.events(0)))
    histories = {rank: read_history(read_log(run.events(rank)) if rank else events) for rank in _ranks(run)}
    first = histories.get(0, History())
    scheduled = list(read_log(run.directives))
    result = read_result(run)
    plan = read_plan_outline(run)
    steps, begin = first.steps, first.begin
    world_size = begin.world_size if begin else None
    time_s = account(events, list(read_sound(run.supervisor_events)), time.time() if running else None)
    return Report(
        path=str(run.root),
        recipe=read_run_record(run).recipe if run.run_json.exists() else "",
        status=status_of(run, running=running, queued=queued),
        exit_code=result.exit_code if result else None,
        steps=steps[-1].step if steps else begin.step if begin else 0,
        max_steps=plan.total_steps,
        elapsed_s=first.last_time - first.first_time,
        start_steps=tuple(start.begin.step for start in first.starts if start.begin),
        world_size=world_size,
        device_name=begin.device_name if begin else "",
        params=begin.params if begin else None,
        final_loss=finite_or_none(steps[-1].loss) if steps else None,
        peak_memory_bytes=result.peak_memory_bytes if result else None,
        weights_sha256=result.weights_sha256 if result else None,
        speed=_measure_speed(histories),
        predicted=from_plain(LocalPrediction, plan.prediction) if plan.prediction else None,
        loss=tuple((event.step, finite_or_none(event.loss)) for event in steps),
        grad_norm=tuple((event.step, finite_or_none(event.grad_norm)) for event in steps),
        skipped_steps=tuple(event.step for event in steps if event.skipped),
        evaluations=tuple(first.of_kind(EvalEvent)),
        checkpoints=tuple(first.of_kind(CheckpointEvent)),
        sample=next(reversed(first.of_kind(SampleEvent)), None),
        warnings=tuple(event for rank in sorted(histories) for event in histories[rank].warnings),
        missing_ranks=tuple(rank for rank in range(world_size or 0) if rank not in histories),
        directives=tuple(event for event in scheduled if isinstance(event, DirectiveEvent)),
        achieved=tuple(event for event in scheduled if isinstance(event, AchievedEvent)),
        buckets=tuple(event for event in scheduled if isinstance(event, BucketsEvent)),
        memory=tuple(event for event in scheduled if isinstance(event, MemoryEvent)),
        left_out=tuple(event for event in scheduled if isinstance(event, NodesEvent)),
        left_out_achieved=tuple(event for event in scheduled if isinstance(event, NodesAchievedEvent)),
        links=next((event.links for event in reversed(events) if isinstance(event, LinksEvent)), ()),
        link_changes=tuple(event for event in events if isinstance(event, LinkEvent)),
        time_s=time_s,
        goodput=time_s.goodput,
        kernels=from_plain(KernelSpec, plan.kernels),
        kernel_table=from_plain(KernelTable, read_json(run.kernels_json)) if run.kernels_json.is_file() else None,
        name=name_of(plan.spec),
        recoveries=tuple(read_recoveries(events)),
    )


def _ranks(run: RunDir) -> list[int]:
    names = (re.fullmatch(r"rank(\d+)\.jsonl", path.name) for path in run.events_folder.glob("rank*.jsonl"))
    return sorted(int(match[1]) for match in names if match)


def _measure_speed(histories: dict[int, History]) -> RunSpeed | None:
    start = histories[0].last_working_start if 0 in histories else None
    if start is None or start.begin is None:
        return None
    begin = start.begin
    throughput = measure_throughput(
        start.steps, flops_per_token=begin.flops_per_token, peak_flops=begin.peak_flops, world_size=begin.world_size
    )
    steady = start.steps[throughput.left_out :]
    means = _mean_parts_s(histories, {event.step for event in steady})
    parts = _summarise_parts(means)
    return RunSpeed(
        tokens_per_s=throughput.tokens_per_s,
        mfu=throughput.mfu,
        peak_flops=begin.peak_flops,
        peak_source=begin.peak_source,
        flops_per_token=begin.flops_per_token,
        first_step=steady[0].step,
        last_step=steady[-1].step,
        left_out_steps=tuple(event.step for event in start.steps[: throughput.left_out]),
        step_time_s=math.fsum(part.mean_s for part in parts),
        usual_s=_usual_s(steady),
        parts=parts,
        ranks=tuple(means),
        unit=begin.unit,
        exchange=_exchange_share(histories, {event.step for event in steady}),
    )


def _exchange_share(histories: dict[int, History], wanted_steps: set[int]) -> ExchangeShare | None:
    starts = (history.last_working_start for history in histories.values())
    seen = [
        (event.exchange_s, event.exposed_s)
        for start in starts
        for event in (start.steps if start else ())
        if event.step in wanted_steps
        and not isinstance(event.exchange_s, Absent)
        and not isinstance(event.exposed_s, Absent)
    ]
    return ExchangeShare(*(math.fsum(seconds) / len(seen) for seconds in zip(*seen, strict=True))) if seen else None


def _usual_s(steps: Sequence[StepEvent]) -> tuple[float, float]:
    """Return the tenth and the ninetieth percentile."""
    plain = [event for event in steps if not event.time_s.get("checkpoint")] or steps
    times = sorted(event.step_time_s for event in plain)
    return times[len(times) // 10], times[len(times) * 9 // 10]


def _mean_parts_s(histories: dict[int, History], wanted_steps: set[int]) -> dict[int, dict[str, float]]:
    """rank -> seconds a step by part, over the wanted steps that the rank has written."""
    means = {}
    for rank, history in sorted(histories.items()):
        start = history.last_working_start
        steps = [event for event in start.steps if event.step in wanted_steps] if start else []
        if steps:
            means[rank] = {
                name: math.fsum(event.time_s.get(name, 0.0) for event in steps) / len(steps) for name in PARTS
            }
    return means


def _summarise_parts(means: dict[int, dict[str, float]]) -> tuple[PartTime, ...]:
    by_part = {name: [mean[name] for mean in means.values()] for name in PARTS}
    mean_s = {name: math.fsum(values) / len(values) for name, values in by_part.items()}
    whole_s = math.fsum(mean_s.values())
    return tuple(
        PartTime(name, mean_s[name], mean_s[name] / whole_s if whole_s else 0.0, min(values), max(values))
        for name, values in by_part.items()
    )


@dataclass
class Start:
    """The events of a rank from one start to the next."""

    begin: StartEvent | None
    """None where it was lost."""
    steps: list[StepEvent] = field(default_factory=list)
    others: list[BesideSteps] = field(default_factory=list)

    def forget_beyond(self, step: int) -> None:
        self.steps = [event for event in self.steps if event.step <= step]
        self.others = [event for event in self.others if event.step <= step]


@dataclass
class History:
    starts: list[Start] = field(default_factory=list)
    warnings: list[WarningEvent] = field(default_factory=list)
    first_time: float = 0.0
    last_time: float = 0.0
    """Unix seconds of the first and the last event."""

    @property
    def steps(self) -> list[StepEvent]:
        return [event for start in self.starts for event in start.steps]

    @property
    def last_working_start(self) -> Start | None:
        """The newest start that made a step."""
        return next((start for start in reversed(self.starts) if start.steps), None)

    @property
    def begin(self) -> StartEvent | None:
        return self.starts[-1].begin if self.starts else None

    def of_kind(self, kind: type[Kind]) -> list[Kind]:
        return [event for start in self.starts for event in start.others if isinstance(event, kind)]


def read_history(events: Iterable[Event]) -> History:
    """Sort events, which are in the order they were written, by start. A resume goes on from a checkpoint: what an
    earlier start made beyond it is made again, and forgotten here."""
    history = History()
    for event in events:
        history.last_time = event.time
        history.first_time = history.first_time or event.time
        if isinstance(event, StartEvent):
            for earlier in history.starts:
                earlier.forget_beyond(event.step)
            history.starts.append(Start(event))
        elif isinstance(event, WarningEvent):
            history.warnings.append(event)
        else:
            _file(history, event)
    return history


def _file(history: History, event: Event) -> None:
    if not history.starts:
        history.starts.append(Start(None))
    if isinstance(event, StepEvent):
        history.starts[-1].steps.append(event)
    elif isinstance(event, BesideSteps):
        history.starts[-1].others.append(event)
