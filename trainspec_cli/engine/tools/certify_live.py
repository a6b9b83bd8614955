"""Runs of `trainspec certify` that the trainer makes as in a launch: with changes of layout, some of which fail or are
cut short, and with memory that runs out.

The processes serve many runs, so none of them may end. A kill is an exception on all ranks at once, after which nothing
of the run is left but its folder, and memory runs out on all ranks in one micro-batch. Then the run starts again, as
its supervisor would start it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.distributed as dist

from trainspec_cli.balance.batch.division import OwnSamples
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import Allowance, TrainState
from trainspec_cli.engine.data.loader import Staging
from trainspec_cli.engine.digest import MicroBatch, weights_sha256
from trainspec_cli.engine.run.coordinator import RunContext, SingleGroup, StepSamples, StepStart, TrainProgress
from trainspec_cli.engine.run.faults import Faults, StopRequest
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.shortage import OutOfMemory
from trainspec_cli.engine.run.sources import WrittenSample
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.tools.certify_batches import Taken, read_drawn, taken_by_all, taken_positions
from trainspec_cli.planner.pipeline import Kind
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Relief
from trainspec_cli.recipe.results.tools import CertifyRun, LiveSteps, TrainedSteps
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult
from trainspec_cli.run.recovery.memory import next_setting, with_reliefs

BUCKET_BYTES = 50_000
"""Small models move in several buckets too, so that a change can be broken off between them."""


class Killed(BaseException):
    """Ends a start of the run, on all ranks at once, as SIGKILL would."""


class DrawnSource:
    """The trainer's view of samples that are drawn from the seed; none are held out."""

    def __init__(self, plan: Plan, state: TrainState):
        self.staging = Staging(state.device)
        self.adopt(plan, state)

    def adopt(self, plan: Plan, state: TrainState) -> None:
        self.plan = plan
        self.state = state
        self._positions_S = None if state.positions_S is None else state.positions_S.cpu()

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        return read_drawn(self.plan.spec, own, self._positions_S)

    def counted(self, positions: np.ndarray) -> int:
        return len(positions) * self.plan.spec.data.seq_len

    def evaluate(self, step: int) -> None:
        return None

    def summarise(self, result: RunResult, evaluated: EvalEvent | None) -> RunResult:
        return result

    def write_sample(self) -> WrittenSample | None:
        return None

    def first_text(self, position: int) -> None:
        return None


@dataclass(frozen=True)
class MadeStep:
    """A step whose gradients were computed to the end."""

    taken: Taken
    layout: Layout
    largest_micro_batch: int
    """The largest micro-batch of this rank, in samples."""


@dataclass
class Trail:
    """The figures of a run, over all its starts."""

    steps: dict[int, MadeStep] = field(default_factory=dict)
    """Steps by the updates made before; a step that is made again stands in the place of the first."""
    losses: dict[int, float | None] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    written_bytes: int = 0
    """Bytes by which the run's folder has grown, logs apart, between a step's end and the passes of the next."""


class WatchedGroup(SingleGroup):
    """One replica group that leaves a trail."""

    def __init__(self, run: RunContext, source: DrawnSource, trail: Trail):
        super().__init__(run)
        self._source = source
        self._trail = trail
        self._folder = run.run_dir

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        self._step, self._held_bytes = progress.step, _bytes_on_disk(self._folder)
        return super().begin(progress, restore)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        held_bytes = _bytes_on_disk(self._folder)
        self._trail.written_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        samples = super().take(steps)
        taken = self._source.state.mesh.data_rank, taken_positions(samples.own)
        self._made = MadeStep(taken, self._source.plan.layout, max(samples.own.sizes))
        return samples

    def commit(self) -> bool:
        self._trail.steps[self._step] = self._made
        return super().commit()


def _bytes_on_disk(run_dir: RunDir) -> int:
    """Return the size of the run's folder but for its logs; 0 on all ranks but the first, which ends a checkpoint."""
    if dist.get_rank() != 0:
        return 0
    return sum(path.stat().st_size for path in run_dir.root.rglob("*") if path.is_file() and path.suffix != ".jsonl")


class LiveFaults(Faults):
    """The recipe's faults, and a kill of all ranks when half of the state has moved."""

    def __init__(self, plan: Plan, run_dir: RunDir, killed_at: int | None):
        super().__init__(plan, run_dir)
        self._killed_at = killed_at

    def during_move(self, step: int) -> Callable[[int, int], None]:
        others = super().during_move(step)

        def inject(bucket: int, buckets: int) -> None:
            others(bucket, buckets)
            if step == self._killed_at and bucket == buckets // 2:
                raise Killed

        return inject


class SharedAllowance(Allowance):
    """Memory that runs out on all ranks: each leaves the step once the others have got its messages."""

    def check(self, kind: Kind, samples: int) -> None:
        try:
            super().check(kind, samples)
        except torch.OutOfMemoryError:
            dist.barrier()
            raise


def run_live(
    wanted: CertifyRun, run_dir: RunDir, device: torch.device, meshes: Meshes
) -> tuple[Trainer, TrainedSteps, LiveSteps]:
    """Train to the last step, in as many starts as it takes; -> (the trainer of the last one, the steps, the trail)."""
    plan = wanted.plan
    killed_at = wanted.killed_at
    trail = Trail()
    while True:
        trainer = _start(plan, run_dir, device, meshes, trail, killed_at)
        trail.starts.append(trainer.progress.step)
        try:
            with _noting_losses(trainer, trail):
                trainer.run()
            break
        except Killed:
            killed_at = None
        except OutOfMemory as error:
            plan = _relieved(plan, error)
    state = trainer.state
    made = [trail.steps[step] for step in sorted(trail.steps)]
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    losses = tuple(trail.losses[step] for step in sorted(trail.losses))
    trained = TrainedSteps(losses, None, sha256, taken_by_all([step.taken for step in made]))
    layouts, sizes = zip(*((step.layout, step.largest_micro_batch) for step in made), strict=True)
    return trainer, trained, LiveSteps(tuple(trail.starts), layouts, sizes, trail.written_bytes)


def _start(
    plan: Plan, run_dir: RunDir, device: torch.device, meshes: Meshes, trail: Trail, killed_at: int | None
) -> Trainer:
    state = build_train_state(plan, device, meshes.of(plan.layout, device.type))
    state.stages = replace(state.stages, allowance=SharedAllowance())
    source = DrawnSource(plan, state)
    run = RunContext(plan, run_dir, source, state, recipe_digest="", stop=StopRequest())
    trainer = Trainer(run, WatchedGroup(run, source, trail))
    trainer.faults = LiveFaults(plan, run_dir, killed_at)
    trainer.layouts.meshes = meshes
    trainer.layouts.bucket_bytes = BUCKET_BYTES
    return trainer


@contextmanager
def _noting_losses(trainer: Trainer, trail: Trail) -> Iterator[None]:
    """Note the losses of a start however it ends, and stop what goes on beside it."""
    try:
        yield
    finally:
        trail.losses |= {event.step: event.loss for event in trainer.tally.steps}
        if trainer.unread:
            trail.losses[trainer.unread.step] = trainer.unread.outcome.loss.item()
        trainer.watch.close()


def _relieved(plan: Plan, error: OutOfMemory) -> Plan:
    """Return the plan of the next start, as the supervisor decides on it; `error` is raised where nothing is left."""
    failed = error.shortage.failed
    taken = next_setting(plan.memory_ladder, failed)
    if taken is None:
        raise error
    return with_reliefs(plan, [Relief(failed, taken)])
