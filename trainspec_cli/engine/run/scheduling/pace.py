"""The samples and the learning rate of the steps to come, by the recipe's batch schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from trainspec_cli.balance.batch.batch_schedule import StepBatch, schedule_batches, step_batch
from trainspec_cli.balance.batch.division import lr_factor
from trainspec_cli.balance.batch.learning_rate import learning_rate
from trainspec_cli.balance.batch.noise import (
    EQUIVALENT_FRACTION,
    BatchPace,
    NoiseAverage,
    PartSquares,
    measure_noise,
    next_size,
    outgrows_noise,
)
from trainspec_cli.engine.run.coordinator import TrainProgress
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.batching import noise_hindrance


class StepPace:
    """The same on every rank: what it learns of the gradients' noise comes with the steps' own exchange."""

    def __init__(self, plan: Plan):
        self._spec = plan.spec
        self._schedule = schedule_batches(plan.spec)
        self.follows_noise = plan.spec.batching.schedule.kind == "noise"
        self.adopt(plan)
        self.state = BatchPace(plan.spec.batching.global_batch_size, NoiseAverage())
        self._warned = False

    def adopt(self, plan: Plan) -> None:
        """Go on in another layout.

        Under cp the noise takes an exchange of all gradients, which nobody pays for where nothing follows it.
        """
        hindrance = noise_hindrance(plan.spec.model, plan.layout, plan.replica_groups, plan.grad_accum_steps)
        self.measures_noise = not hindrance and (self.follows_noise or plan.layout.cp == 1)

    @property
    def kept(self) -> BatchPace | None:
        """Return what a checkpoint holds, for a resumed run to decide the same."""
        return self.state if self.follows_noise else None

    def batch(self, progress: TrainProgress) -> StepBatch | None:
        """Return the step that begins at `progress`; None where the run has trained all that it should.

        A constant batch is counted in steps unless the recipe says how much is trained: while a replica group is away,
        they may have fewer samples.
        """
        if self._spec.ends_by_samples:
            size = self.state.size if self.follows_noise else None
            over = progress.samples >= self._schedule.run_samples
            return None if over else step_batch(self._schedule, progress.samples, size)
        if progress.step >= self._spec.train.max_steps:
            return None
        optim = self._spec.optim
        rate = learning_rate(optim.schedule, optim.lr, progress.step, self._spec.train.max_steps)
        return StepBatch(self._spec.batching.global_batch_size, rate)

    def coming(self, progress: TrainProgress, steps: int) -> list[tuple[int, int]]:
        """Return (first position, samples) of so many steps from `progress` on, as far as they are foreseen."""
        return list(islice(self._following(progress), steps))

    def _following(self, progress: TrainProgress) -> Iterator[tuple[int, int]]:
        while batch := self.batch(progress):
            yield progress.samples, batch.samples
            progress = TrainProgress(progress.step + 1, progress.samples + batch.samples)

    def note_step(self, step: int, samples: int, squares: Sequence[PartSquares]) -> float | None:
        """Take in the squared norms of the gradients of a step of `samples`.

        Return the noise scale in samples, averaged over the steps so far; None where nothing was measured.
        """
        if min(of.parts for of in squares) < 2:
            return None
        batching, size, noise = self._spec.batching, self.state.size, self.state.noise
        noise = noise.updated(measure_noise(samples, squares), batching.schedule.smoothing_steps)
        if self.follows_noise and step % batching.schedule.interval_steps == 0:
            size = next_size(batching, size, noise.noise_scale)
        self.state = BatchPace(size, noise)
        return noise.noise_scale

    def warning(self, samples: int) -> str | None:
        """Return what to tell of a step of `samples` whose batch has outgrown the noise; None where it has not, or
        it was said before."""
        batching, noise = self._spec.batching, self.state.noise
        if self._warned or not outgrows_noise(batching, samples, noise):
            return None
        self._warned = True
        measured = f"{noise.noise_scale:.3g} over {batching.schedule.smoothing_steps} steps"
        return (
            f"the batch has grown to {samples} samples, more than half the gradient noise scale ({measured}): "
            f"the loss tends to suffer. {self._remedy()}"
        )

    def _remedy(self) -> str:
        """Return what to type in the next run: the growth that the noise allows, or a smaller first batch."""
        batching, scale = self._spec.batching, self.state.noise.noise_scale or 0.0
        allowed, first = batching.sizes_up_to(EQUIVALENT_FRACTION * scale), batching.global_batch_size
        if batching.schedule.kind == "ramp":
            return "In the next run, let batching.schedule.stages grow later or less"
        if len(allowed) > 1:
            return f"In the next run, type batching.schedule.max_global_batch_size={allowed[-1]}"
        smaller = max(1, math.floor(min(scale, first) / 4))
        steps = round(self._schedule.run_samples / smaller)
        lr = self._spec.optim.lr * lr_factor(self._schedule.lr_rule, smaller, first)
        return (
            f"In the next run, begin with a smaller batch: type batching.global_batch_size={smaller} "
            f"train.max_steps={steps} optim.lr={lr:.3g}, or batching.schedule.kind=constant"
        )
