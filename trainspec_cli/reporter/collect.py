"""A run folder -> a Report: plain data, for people (`render`) and for programs (`--json`)."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainspec_cli.core.errors import ERRORS_OF_RUNS, Interrupted, Problem, Stopped, TrainspecError, WorkerError
from trainspec_cli.recipe.keys.kernels import KernelSpec, KernelTable
from trainspec_cli.recipe.records import Absent, from_plain, to_plain
from trainspec_cli.recipe.results.plan import LocalPrediction
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.run_speed import History, RunSpeed, SpeedMeter
from trainspec_cli.reporter.runs import name_of, status_of
from trainspec_cli.run.folder.accounting import Recovery, RecoveryLog, RunAccount, WallTime
from trainspec_cli.run.folder.event_types.events import (
    AchievedEvent,
    BucketsEvent,
    CheckpointEvent,
    DirectiveEvent,
    EvalEvent,
    Event,
    LinkEvent,
    LinkRate,
    LinksEvent,
    MemoryEvent,
    NodesAchievedEvent,
    NodesEvent,
    SampleEvent,
    WarningEvent,
)
from trainspec_cli.run.folder.events import read_log, read_sound
from trainspec_cli.run.folder.files import StepCurve, read_versioned
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_outline, read_result, read_run_record

HELDOUT = ("heldout_loss", "heldout_bits_per_byte", "heldout_accuracy", "heldout_dice")
"""Figures of an evaluation; which of them it has depends on the data."""
Curve = Sequence[tuple[int, float | None]]
"""(step, value); None where the value was not finite."""


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
    """The model's own; a fine-tune with LoRA trains `adapter_params` beside them."""
    adapter_params: int
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
    reason: str = ""
    """Why the run failed; empty where it did not."""
    hint: str = ""
    """What to do about that, where it is known."""
    lr: Curve = ()
    """The learning rate of each step; empty where no step states one."""

    def curves(self) -> dict[str, list[float | None]]:
        """Return all curves as columns of one table with a row for each step: `pandas.DataFrame(report.curves())`."""
        columns: dict[str, dict[int, float | None]] = {
            "loss": dict(self.loss),
            "grad_norm": dict(self.grad_norm),
            "lr": dict(self.lr),
        }
        for event in self.evaluations:
            figures = {name: getattr(event, name) for name in HELDOUT}
            for set_name, of_set in ({} if isinstance(event.sets, Absent) else event.sets).items():
                figures |= {f"{set_name}/{name}": value for name, value in to_plain(of_set).items()}
            for name, value in figures.items():
                if not isinstance(value, Absent):
                    columns.setdefault(name, {})[event.step] = value
        steps = sorted({step for column in columns.values() for step in column})
        table = {name: [column.get(step) for step in steps] for name, column in columns.items()}
        return {"step": list(steps), **table}

    def raise_for_status(self) -> None:
        """Raise the error that the command line ends with for a run that failed, was stopped or was killed; nothing
        for one that is done or still to end."""
        if self.status not in ("failed", "stopped", "killed"):
            return
        kinds: dict[int, type[TrainspecError]] = {
            **ERRORS_OF_RUNS,
            Stopped.exit_code: Stopped,
            Interrupted.exit_code: Interrupted,
        }
        # A killed run left no result: its exit code is not known.
        kind = kinds.get(WorkerError.exit_code if self.exit_code is None else self.exit_code, WorkerError)
        message = self.reason or f"the run in {self.path} was {self.status} at step {self.steps}"
        code = "worker_failed" if self.status == "failed" else self.status
        raise kind(Problem(code, message, hint=self.hint or f"trainspec report {shlex.quote(self.path)}"))


def collect(root: Path | str, *, running: bool = False, queued: bool = False) -> Report:
    """Read what is there; a run that is still going, or was cut short, gives what it has so far."""
    run = RunDir(root)
    log = RunLog(list(read_sound(run.supervisor_events)))
    plan = read_plan_outline(run)
    for event in read_log(run.events(0)):
        log.take(event)
    first = log.history
    meter = SpeedMeter(log.history)
    warnings: list[WarningEvent] = []
    begin = first.begin
    world_size = begin.world_size if begin else None
    # Ranks are read one after another: the events of thousands of ranks would not fit into memory together.
    files = _events_of_ranks(run, plan.replica_groups, world_size or 0)
    for rank, path in files.items():
        history = first if rank == 0 else History()
        for event in read_log(path) if rank else ():
            history.take(event)
        # Every rank warns for itself; the log of the first holds only its own.
        warnings += history.warnings
        meter.take(rank, history)
    scheduled = list(read_log(run.directives))
    result = read_result(run)
    loss = StepCurve(*first.column("loss"))
    grad_norm = StepCurve(*first.column("grad_norm"))
    lr = StepCurve(*first.column("lr"))
    time_s = log.time.spent(time.time() if running else None)
    return Report(
        path=str(run.root),
        recipe=read_run_record(run).recipe if run.run_json.exists() else "",
        status=status_of(run, running=running, queued=queued),
        exit_code=result.exit_code if result else None,
        # A run that was resumed and made no step yet still has those of its checkpoint.
        steps=loss[-1][0] if loss else begin.step if begin else 0,
        max_steps=plan.total_steps,
        elapsed_s=first.last_time - first.first_time,
        start_steps=tuple(start.begin.step for start in first.starts if start.begin),
        world_size=world_size,
        device_name=begin.device_name if begin else "",
        params=begin.params if begin else None,
        adapter_params=begin.adapter_params if begin else 0,
        final_loss=loss[-1][1] if loss else None,
        peak_memory_bytes=result.peak_memory_bytes if result else None,
        weights_sha256=result.weights_sha256 if result else None,
        speed=meter.speed,
        predicted=from_plain(LocalPrediction, plan.prediction) if plan.prediction else None,
        loss=loss,
        grad_norm=grad_norm,
        skipped_steps=tuple(step for step, skipped in zip(*first.column("skipped"), strict=True) if skipped),
        evaluations=tuple(first.of_kind(EvalEvent)),
        checkpoints=tuple(first.of_kind(CheckpointEvent)),
        sample=next(reversed(first.of_kind(SampleEvent)), None),
        warnings=tuple(warnings),
        missing_ranks=tuple(rank for rank in range(world_size or 0) if rank not in files),
        directives=tuple(event for event in scheduled if isinstance(event, DirectiveEvent)),
        achieved=tuple(event for event in scheduled if isinstance(event, AchievedEvent)),
        buckets=tuple(event for event in scheduled if isinstance(event, BucketsEvent)),
        memory=tuple(event for event in scheduled if isinstance(event, MemoryEvent)),
        left_out=tuple(event for event in scheduled if isinstance(event, NodesEvent)),
        left_out_achieved=tuple(event for event in scheduled if isinstance(event, NodesAchievedEvent)),
        links=log.links,
        link_changes=tuple(log.link_changes),
        time_s=time_s,
        goodput=time_s.goodput,
        kernels=from_plain(KernelSpec, plan.kernels),
        kernel_table=from_plain(KernelTable, read_versioned(run.kernels_json)) if run.kernels_json.is_file() else None,
        # From the plan, which runs of any version have.
        name=name_of(plan.spec),
        lr=lr if any(value is not None for _, value in lr) else (),
        reason=_text(result.reason) if result else "",
        hint=_text(result.hint) if result else "",
        recoveries=tuple(log.recoveries.recoveries),
    )


def _text(value: str | Absent) -> str:
    return "" if isinstance(value, Absent) else value


class RunLog:
    """The first rank's file, which is the run's log: taken in event by event, of which figures alone are kept."""

    def __init__(self, marks: Sequence[Event]):
        """`marks`: those of the supervisor."""
        self.history, self.time, self.recoveries = History(), RunAccount(marks), RecoveryLog()
        self.links: tuple[LinkRate, ...] = ()
        self.link_changes: list[LinkEvent] = []

    def take(self, event: Event) -> None:
        self.history.take(event)
        self.time.take(event)
        self.recoveries.take(event)
        if isinstance(event, LinksEvent):
            self.links = event.links
        elif isinstance(event, LinkEvent):
            self.link_changes.append(event)


def _events_of_ranks(run: RunDir, groups: int, world_size: int) -> dict[int, Path]:
    """Return the files of the ranks that left events. Ranks of replica groups are counted through, as the diagnosis
    does; each group has a folder, and the first group's rank 0 writes the run's own file, too."""
    if groups < 2:
        names = ((re.fullmatch(r"rank(\d+)\.jsonl", path.name), path) for path in run.events_folder.glob("rank*.jsonl"))
        return dict(sorted((int(match[1]), path) for match, path in names if match))
    each = max(1, world_size // groups)
    # Replica groups number their ranks from 0 each.
    paths = {rank: run.group_events(*divmod(rank, each)) if rank else run.events(0) for rank in range(world_size)}
    return {rank: path for rank, path in paths.items() if path.is_file()}
