"""Collect a run folder into a Report: the plain data that `render` shows and `--json` prints."""

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
"""The metrics of evaluations; the kind of data determines which of them exist."""
Curve = Sequence[tuple[int, float | None]]
"""(step, value); None where the value was not finite."""


@dataclass(frozen=True)
class Report:
    path: str
    recipe: str
    status: str
    """The run's status: done, stopped, failed, running, queued, made (never started), or killed (ended without a
    result)."""
    exit_code: int | None
    steps: int
    max_steps: int | None
    elapsed_s: float
    """Time from the first event to the last, including pauses between a stop and a resume."""
    start_steps: tuple[int, ...]
    """Steps at which the workers started: 0, and the first step after each resume."""
    world_size: int | None
    device_name: str
    params: int | None
    """Number of parameters of the base model. A LoRA fine-tune trains `adapter_params`, which are not included."""
    adapter_params: int
    final_loss: float | None
    peak_memory_bytes: int | None
    weights_sha256: str | None
    speed: RunSpeed | None
    """The speed of the run; None before the first step."""
    predicted: LocalPrediction | None
    """The plan's prediction, or None."""
    loss: Curve
    grad_norm: Curve
    skipped_steps: tuple[int, ...]
    """Steps whose updates were skipped because they were not finite."""
    evaluations: tuple[EvalEvent, ...]
    checkpoints: tuple[CheckpointEvent, ...]
    """All checkpoints that have been written; older ones may have been deleted since."""
    sample: SampleEvent | None
    warnings: tuple[WarningEvent, ...]
    missing_ranks: tuple[int, ...]
    """Ranks that have written no events."""
    directives: tuple[DirectiveEvent, ...] = ()
    """Changes made or advised by the scheduler."""
    achieved: tuple[AchievedEvent, ...] = ()
    """Effects of these changes, each with the number of its directive and the replica group."""
    buckets: tuple[BucketsEvent, ...] = ()
    """Gradient bucket sizes that the run chose."""
    memory: tuple[MemoryEvent, ...] = ()
    """Changes made after running out of memory."""
    left_out: tuple[NodesEvent, ...] = ()
    """Nodes that were dropped, or that the scheduler advises dropping."""
    left_out_achieved: tuple[NodesAchievedEvent, ...] = ()
    """Effects of dropping nodes, each with the number of the event that dropped the node."""
    links: tuple[LinkRate, ...] = ()
    """The slowest link of each axis, as last recorded."""
    link_changes: tuple[LinkEvent, ...] = ()
    """Links that have become faster or slower."""
    time_s: WallTime = field(default_factory=WallTime)
    """The wall time of all attempts, by part."""
    goodput: float | None = None
    """The productive fraction of the wall time."""
    verdicts: tuple[RunVerdict, ...] = ()
    """Verdicts on the causes of slowdowns, most expensive first."""
    kernels: KernelSpec = field(default_factory=KernelSpec)
    """The chosen backend of each operation."""
    kernel_table: KernelTable | None = None
    """Kernel measurements of `kernels=auto`; None if nothing was measured."""
    name: str = ""
    """The recipe's `run.name`."""
    recoveries: tuple[Recovery, ...] = ()
    """The cost of each failure."""
    reason: str = ""
    """Why the run failed; empty if it did not."""
    hint: str = ""
    """What to do about the failure, if known."""
    lr: Curve = ()
    """The learning rate of each step; empty if no step records one."""

    def curves(self) -> dict[str, list[float | None]]:
        """Return all curves as columns of one table with one row per step: `pandas.DataFrame(report.curves())`."""
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
        """Raise the command line's error for a run that failed, was stopped or was killed; return normally if the run
        is done or still running."""
        if self.status not in ("failed", "stopped", "killed"):
            return
        kinds: dict[int, type[TrainspecError]] = {
            **ERRORS_OF_RUNS,
            Stopped.exit_code: Stopped,
            Interrupted.exit_code: Interrupted,
        }
        # A killed run left no result, so its exit code is unknown.
        kind = kinds.get(WorkerError.exit_code if self.exit_code is None else self.exit_code, WorkerError)
        message = self.reason or f"the run in {self.path} was {self.status} at step {self.steps}"
        code = "worker_failed" if self.status == "failed" else self.status
        raise kind(Problem(code, message, hint=self.hint or f"trainspec report {shlex.quote(self.path)}"))


def collect(root: Path | str, *, running: bool = False, queued: bool = False) -> Report:
    """Read the run folder. For a run that is in progress or was interrupted, return what has been written so far."""
    run = RunDir(root)
    log = RunLog(list(read_sound(run.supervisor_events)))
    plan = read_plan_outline(run)
    for event in read_log(run.events(0)):
        log.add(event)
    first = log.history
    meter = SpeedMeter(log.history)
    warnings: list[WarningEvent] = []
    begin = first.begin
    world_size = begin.world_size if begin else None
    # Ranks are read one after another, because the events of thousands of ranks would not fit into memory together.
    files = _events_of_ranks(run, plan.replica_groups, world_size or 0)
    for rank, path in files.items():
        history = first if rank == 0 else History()
        for event in read_log(path) if rank else ():
            history.add(event)
        # Each rank logs its own warnings, so the first rank's file does not contain those of the other ranks.
        warnings += history.warnings
        meter.add(rank, history)
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
        # A run that was resumed but has no new steps still has the steps up to its checkpoint.
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
        # This is taken from the plan, because runs of all versions have a plan.
        name=name_of(plan.spec),
        lr=lr if any(value is not None for _, value in lr) else (),
        reason=_text(result.reason) if result else "",
        hint=_text(result.hint) if result else "",
        recoveries=tuple(log.recoveries.recoveries),
    )


def _text(value: str | Absent) -> str:
    return "" if isinstance(value, Absent) else value


class RunLog:
    """Reads the first rank's file (the run's log) event by event, and keeps only numbers."""

    def __init__(self, marks: Sequence[Event]):
        """`marks`: events recorded by the supervisor."""
        self.history, self.time, self.recoveries = History(), RunAccount(marks), RecoveryLog()
        self.links: tuple[LinkRate, ...] = ()
        self.link_changes: list[LinkEvent] = []

    def add(self, event: Event) -> None:
        self.history.add(event)
        self.time.take(event)
        self.recoveries.take(event)
        if isinstance(event, LinksEvent):
            self.links = event.links
        elif isinstance(event, LinkEvent):
            self.link_changes.append(event)


def _events_of_ranks(run: RunDir, groups: int, world_size: int) -> dict[int, Path]:
    """Return the event files by rank. Ranks are numbered across replica groups, as in the diagnosis. Each group writes
    to a separate folder, and the first group's rank 0 also writes the run's main file."""
    if groups < 2:
        names = ((re.fullmatch(r"rank(\d+)\.jsonl", path.name), path) for path in run.events_folder.glob("rank*.jsonl"))
        return dict(sorted((int(match[1]), path) for match, path in names if match))
    each = max(1, world_size // groups)
    # Each replica group numbers its ranks from 0.
    paths = {rank: run.group_events(*divmod(rank, each)) if rank else run.events(0) for rank in range(world_size)}
    return {rank: path for rank, path in paths.items() if path.is_file()}
