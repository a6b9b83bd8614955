"""Perform the runs that `trainspec certify` evaluates: train plans on samples generated from the plan's seed.

Each run writes gradients.stage*.npz (every parameter's full gradient in the first step or, for a run of the trainer, in
the step after the last one), weights.stage*.npz (every full parameter after the last step) and result.json (losses,
digests, positions of the samples).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trainspec_cli.balance.batch.division import OwnSamples, even_division_of
from trainspec_cli.engine.build.assemble import build_train_state
from trainspec_cli.engine.build.train_state import Allowance, TrainState
from trainspec_cli.engine.checkpoint.manifest import About
from trainspec_cli.engine.checkpoint.saver import Saver, load_newest
from trainspec_cli.engine.comm.joining import join_processes
from trainspec_cli.engine.comm.json_collectives import gather_json
from trainspec_cli.engine.data.loader import Staging, cut_micro_batches, positions_of
from trainspec_cli.engine.digest import MicroBatch, held_part, weights_sha256
from trainspec_cli.engine.observe.journal import Journal
from trainspec_cli.engine.optim.optimizer import clear_gradients, set_learning_rate
from trainspec_cli.engine.run.coordinator import Coordinator, StepSamples, StepStart
from trainspec_cli.engine.run.faults import Faults, StopRequest
from trainspec_cli.engine.run.scheduling.relayout import Meshes
from trainspec_cli.engine.run.scheduling.step_scheduler import StepPace
from trainspec_cli.engine.run.shortage import OutOfMemory
from trainspec_cli.engine.run.sources import WrittenSample
from trainspec_cli.engine.run.step import compute_gradients, train_step
from trainspec_cli.engine.run.trainer import Trainer
from trainspec_cli.engine.run.training_run import TrainingRun, TrainProgress
from trainspec_cli.engine.shares import Share, unique_shares
from trainspec_cli.planner.pipeline import Kind
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import Relief
from trainspec_cli.recipe.results.tools import (
    DRAWN_BATCHES,
    DRAWN_TOKENS,
    CertifyRequest,
    CertifyResult,
    CertifyRun,
    CertifyRunResult,
    LiveSteps,
    TrainedSteps,
)
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import RunResult
from trainspec_cli.run.recovery.memory import next_setting, with_reliefs


def run(request: CertifyRequest) -> CertifyResult:
    """Run all of the request's plans, which use the same number of processes, one after another."""
    device = join_processes(next(iter(request.runs.values())).plan.device)
    for name, wanted in request.runs.items():
        result = run_one(wanted, Path(request.folder), name, device)
        if dist.get_rank() == 0:
            write_json(Path(request.folder, name, "result.json"), to_plain(result))
        dist.barrier()
    return CertifyResult(len(request.runs))


def run_one(wanted: CertifyRun, folder: Path, name: str, device: torch.device) -> CertifyRunResult:
    torch.compiler.reset()
    plan = wanted.plan
    own = folder / name
    if wanted.live:
        trainer, trained, live = run_live(wanted, RunDir(own / "run"), device, MESHES)
        state = trainer.run.state
        write_parameters(state, own, "weights", lambda share: share.parameter)
        if wanted.gradients:  # write the gradients that the next step would compute
            samples = (trainer.progress.samples, plan.spec.batching.global_batch_size)
            following = trainer.coordinator.division.of_rank(state.mesh.data_rank, *samples)
            leave_gradients(plan, state, own, following)
        return CertifyRunResult(trained, None, live)
    mesh = MESHES.of(plan.layout, device.type)
    state = build_train_state(plan, device, mesh)
    if wanted.inputs:
        write_parameters(state, own, "first", lambda share: share.parameter)
        if dist.get_rank() == 0:
            # The tokens of each step's full batch, (steps, samples, length + 1) in int64. From step `clip_from` on,
            # every step gets the same batch.
            blocks = [
                step if wanted.clip_from is None or step < wanted.clip_from else wanted.clip_from
                for step in range(wanted.steps)
            ]
            drawn = []
            for block in blocks:
                generator = torch.Generator().manual_seed(plan.spec.train.seed * 1_000_003 + block)
                inputs, targets, *_ = drawn_samples(plan.spec, generator)
                drawn.append(torch.cat((inputs, targets[:, -1:]), dim=1))
            tokens = torch.stack(drawn).numpy()
            np.savez(own / DRAWN_BATCHES, **{DRAWN_TOKENS: tokens})  # type: ignore[arg-type]
    if wanted.gradients:
        first = own_samples(wanted, state, 0, plan.spec.batching.global_batch_size)
        leave_gradients(plan, state, own, first, wanted.exchanges)
    source = folder / wanted.continues if wanted.continues else None
    trained = train(wanted, state, own, source)
    if wanted.steps:
        write_parameters(state, own, "weights", lambda share: share.parameter)
    if not wanted.resume:
        return CertifyRunResult(trained, None)
    resumed = train(replace(wanted, save_at=None), build_train_state(plan, device, mesh), own, source=own)
    return CertifyRunResult(trained, resumed)


MESHES = Meshes()
"""The process groups of all runs. They are shared because each group has threads, so a hundred meshes would have
thousands of threads."""


def leave_gradients(plan: Plan, state: TrainState, folder: Path, own: OwnSamples, exchanges: int = 1) -> None:
    """Write the gradients of a batch, averaged over `exchanges` exchanges. `own`: this rank's part of the batch."""
    means: dict[int, Tensor] = {}  # keyed by share, because a tied embedding exists twice with the same name
    for _ in range(exchanges):
        compute_gradients(state, drawn_batch(plan.spec, state, own), plan.tokens_per_step)
        for share in state.shares:
            if (gradient := share.parameter.grad) is not None:
                part = gradient.detach() / exchanges
                means[id(share)] = means[id(share)] + part if id(share) in means else part
        clear_gradients(state.shares)
        state.compression.end_step(torch.zeros(()))
    write_parameters(state, folder, "gradients", lambda share: means.get(id(share)))
    state.compression.clear()


def train(wanted: CertifyRun, state: TrainState, folder: Path, source: Path | None) -> TrainedSteps:
    """Train up to the last step, from the first step or from the checkpoint in `source`; the recipe sets the number of
    samples per step."""
    spec = wanted.plan.spec
    pace = StepPace(spec)
    progress = TrainProgress()
    if source is not None and (restored := load_newest(RunDir(source), state.held, state.device)):
        progress = TrainProgress(restored.manifest.step, restored.manifest.about.samples)
    losses = []
    norms = []
    taken = []
    while progress.step < wanted.steps and (batch := pace.batch(progress)):
        clips = wanted.clip_from is not None and progress.step >= wanted.clip_from
        start = batch.samples * (wanted.clip_from or 0) if clips else progress.samples
        own = own_samples(wanted, state, start, batch.samples)
        set_learning_rate(state.optimizer, batch.lr)
        outcome = train_step(
            state,
            drawn_batch(spec, state, own),
            global_tokens=batch.samples * spec.data.seq_len,
            clip_norm=wanted.clip_norm if clips else spec.optim.grad_clip_norm,
        )
        assert outcome is not None, "with one replica group, every step counts"
        losses.append(outcome.loss.item())
        norms += [outcome.grad_norm.item()] if clips else []
        taken.append((state.mesh.data_rank, taken_positions(own)))
        progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)
        if progress.step == wanted.save_at:
            _save(wanted.plan, state, RunDir(folder), progress)
    sha256 = weights_sha256(state.shares, state.mesh.group("pp"))
    return TrainedSteps(tuple(losses), min(norms, default=None), sha256, taken_by_all(taken))


def _save(plan: Plan, state: TrainState, run_dir: RunDir, progress: TrainProgress) -> None:
    saver = Saver(run_dir, state.held, state.device, keep_last=1)
    saver.save(About(progress.step, progress.samples, seed=plan.spec.train.seed, recipe_digest=""))
    saver.close()


def own_samples(wanted: CertifyRun, state: TrainState, start: int, samples: int) -> OwnSamples:
    """Return this rank's part of a step's samples, which begin at `start`."""
    division = even_division_of(wanted.plan)
    if wanted.weights:
        division = replace(division, weights=wanted.weights)
    return division.of_rank(state.mesh.data_rank, start, samples)


def write_parameters(state: TrainState, folder: Path, name: str, tensor_of: Callable[[Share], Tensor | None]) -> None:
    """Write the result of `tensor_of` for each parameter of this pipeline rank's stages. None results are skipped."""
    whole: dict[str, np.ndarray] = {}
    for share in unique_shares(state.shares):
        if (tensor := tensor_of(share)) is not None:
            whole[share.name] = share.gather(tensor.detach()).float().cpu().numpy()
    if state.mesh.stage.get_local_rank() == 0:
        np.savez(folder / f"{name}.stage{state.mesh.rank('pp')}.npz", **whole)  # type: ignore[arg-type]
    dist.barrier()


# Perform runs for `trainspec certify` that use the trainer as a launch does. They change layouts (some changes fail or
# are interrupted), and ranks run out of memory.
#
# The processes serve many runs, so they must not end. A kill is simulated by an exception on all ranks at the same
# time, after which only the run folder remains. All ranks run out of memory in the same micro-batch. Then the run
# restarts, as its supervisor would restart it.


BUCKET_BYTES = 50_000
"""A bucket size small enough that even small models are moved in several buckets, between which a change can be
interrupted."""


class Killed(BaseException):
    """Raised on all ranks at the same time, to end a start of the run as SIGKILL would."""


class DrawnSource:
    """The trainer's source of samples, which are generated from the seed; none are held out."""

    def __init__(self, run: TrainingRun):
        self.run = run
        self.staging = Staging(run.state.device)

    def read(self, own: OwnSamples) -> list[MicroBatch]:
        return read_drawn(self.run.plan.spec, own, self.run.state.positions_S)

    def counted(self, positions: np.ndarray) -> int:
        return len(positions) * self.run.plan.spec.data.seq_len

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
    """A step that computed all its gradients."""

    taken: Taken
    layout: Layout
    largest_micro_batch: int
    """The largest micro-batch of this rank, in samples."""


@dataclass
class Trail:
    """The record of a run over all its starts."""

    steps: dict[int, MadeStep] = field(default_factory=dict)
    """Steps by the number of updates made before them. A repeated step replaces its first attempt."""
    losses: dict[int, float | None] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    written_bytes: int = 0
    """Growth of the run folder (without logs) between the end of a step and the next step's passes, in bytes."""


class WatchedGroup(Coordinator):
    """A coordinator for one replica group that also records the steps taken."""

    def __init__(self, run: TrainingRun, source: DrawnSource, trail: Trail):
        super().__init__(run, source)
        self._trail = trail

    def begin(self, progress: TrainProgress, restore: Callable[[], TrainProgress]) -> StepStart:
        self._step = progress.step
        self._held_bytes = _bytes_on_disk(self._run.run_dir)
        return super().begin(progress, restore)

    def take(self, steps: Sequence[tuple[int, int]]) -> StepSamples:
        held_bytes = _bytes_on_disk(self._run.run_dir)
        self._trail.written_bytes += held_bytes - self._held_bytes
        self._held_bytes = held_bytes
        samples = super().take(steps)
        taken = self._run.state.mesh.data_rank, taken_positions(samples.own)
        self._made = MadeStep(taken, self._run.plan.layout, max(samples.own.sizes))
        return samples

    def commit(self) -> bool:
        self._trail.steps[self._step] = self._made
        return super().commit()


def _bytes_on_disk(run_dir: RunDir) -> int:
    """Return the size of the run folder without logs, in bytes, on rank 0, which completes checkpoints; 0 on all other
    ranks."""
    if dist.get_rank() != 0:
        return 0
    return sum(path.stat().st_size for path in run_dir.root.rglob("*") if path.is_file() and path.suffix != ".jsonl")


class LiveFaults(Faults):
    """Injects the recipe's faults, and kills all ranks when half of the state has been moved."""

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
    """A memory limit that all ranks exceed. Each rank leaves the step only after the other ranks have received its
    messages."""

    def check(self, kind: Kind, samples: int) -> None:
        try:
            super().check(kind, samples)
        except torch.OutOfMemoryError:
            dist.barrier()
            raise


def run_live(
    wanted: CertifyRun, run_dir: RunDir, device: torch.device, meshes: Meshes
) -> tuple[Trainer, TrainedSteps, LiveSteps]:
    """Train until the last step, in as many starts as needed. Return (the last start's trainer, the steps, the
    record)."""
    plan = wanted.plan
    killed_at = wanted.killed_at
    trail = Trail()
    while True:
        trainer = _start(plan, run_dir, device, meshes, trail, killed_at)
        trail.starts.append(trainer.progress.step)
        try:
            trainer.train()
            break
        except Killed:
            killed_at = None
        except OutOfMemory as error:  # choose the next setting as the supervisor would
            taken = next_setting(plan.memory_ladder, error.shortage.failed)
            if taken is None:
                raise
            plan = with_reliefs(plan, [Relief(error.shortage.failed, taken)])
        finally:  # also close the trainer after a start that ended early
            trail.losses |= {event.step: event.loss for event in trainer.tally.steps}
            if trainer.unread:
                trail.losses[trainer.unread.step] = trainer.unread.outcome.loss.item()
            trainer.watch.close()
    state = trainer.run.state
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
    journal = Journal(run_dir, dist.get_rank(), plan.spec)
    run = TrainingRun(plan, state, run_dir, recipe_digest="", stop=StopRequest(), journal=journal)
    source = DrawnSource(run)
    trainer = Trainer(run, source, WatchedGroup(run, source, trail))
    trainer.faults = LiveFaults(plan, run_dir, killed_at)
    trainer.layouts.meshes = meshes
    trainer.layouts.bucket_bytes = BUCKET_BYTES
    return trainer


# Generate the samples of `trainspec certify` runs from the seed, and check which samples each rank has read.


Taken = tuple[int, tuple[int, ...]]
"""A process's data-parallel rank in a step, and the positions of the samples that it has read."""


def drawn_batch(spec: RunSpec, state: TrainState, own: OwnSamples) -> list[MicroBatch]:
    """Return the micro-batches of `own` on the device of `state`, as generated by `read_drawn`."""
    drawn = read_drawn(spec, own, None)
    whole = [tuple(tensor.to(state.device) for tensor in part) for part in drawn]
    return [held_part(part, state.positions_S) for part in whole]


def read_drawn(spec: RunSpec, own: OwnSamples, positions_S: Tensor | None) -> list[MicroBatch]:
    """Return the micro-batches of `own` on the host. The sample at a position does not depend on layout or division.
    `positions_S`: set if a rank holds a part of each sequence.

    Samples are generated in blocks of the size of the first step's batch, each with a separate generator.
    """
    positions = positions_of(own)
    block_size = spec.batching.global_batch_size
    blocks = range(int(positions.min()) // block_size, int(positions.max()) // block_size + 1)
    seeds = (spec.train.seed * 1_000_003 + block for block in blocks)
    drawn = zip(*(drawn_samples(spec, torch.Generator().manual_seed(seed)) for seed in seeds), strict=True)
    mine = tuple(torch.cat(tensors)[positions - blocks[0] * block_size] for tensors in drawn)
    return [held_part(part, positions_S) for part in cut_micro_batches(mine, own)]


def drawn_samples(spec: RunSpec, generator: torch.Generator) -> MicroBatch:
    """Return a global batch of tokens and their targets, or of images and labels."""
    model = spec.model
    samples = spec.batching.global_batch_size
    if model.unit == "samples":
        images = torch.randn((samples, model.in_channels, *model.input_size), generator=generator)
        labelled = model.input_size if model.segments else ()
        return images, torch.randint(model.num_classes, (samples, *labelled), generator=generator)
    drawn = torch.randint(model.vocab_size, (samples, spec.data.seq_len + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def taken_positions(own: OwnSamples) -> tuple[int, ...]:
    runs = (range(start, start + size) for start, size in zip(own.starts, own.sizes, strict=True))
    return tuple(position for run in runs for position in run)


def taken_by_all(taken: Sequence[Taken]) -> tuple[tuple[int, ...], ...]:
    """Return the positions read by all ranks together in each step; this rank has read `taken`. Ranks that work on the
    same samples must have read the same positions."""
    of_ranks = gather_json(
        taken, lambda of_rank: [(int(rank), tuple(map(int, positions))) for rank, positions in of_rank]
    )
    steps = (dict.fromkeys(step) for step in zip(*of_ranks, strict=True))
    return tuple(tuple(sorted(position for _, own in step for position in own)) for step in steps)
