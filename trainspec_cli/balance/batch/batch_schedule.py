"""The samples and the learning rate of each step: pure functions of the samples trained so far.

A run trains `train.max_steps` x `batching.global_batch_size` samples under every schedule, and ends with the step that
trains the last of them. A step of B samples stands for B / B0 steps of the starting size B0. Its learning rate is that
of `optim.schedule` in the middle of these, times f(B / B0), where f is `batching.schedule.lr_rule`.

So a batch that grows while the schedule lowers the rate replaces the lower rate. Where the schedule multiplies the rate
by a, a batch of B0 / a keeps a f(1/a) of the rate: sqrt(a) for AdamW, as Seesaw has it (arXiv:2510.14717), and the
whole rate for SGD (arXiv:1711.00489; arXiv:2510.14717, theorem 1). A run then makes as many steps as the mean of a
tells: half as many for a cosine that ends at 0, 1 - 2/pi fewer for a quarter of a cosine.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainspec_cli.balance.batch.division import lr_factor
from trainspec_cli.balance.batch.learning_rate import learning_rate
from trainspec_cli.recipe.keys.batching import ShrinkRule
from trainspec_cli.recipe.keys.optim import OptimSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.rules.batching import largest_size

OPTIMIZER_RULES: Mapping[str, ShrinkRule] = {"adamw": "sqrt", "adamw8bit": "sqrt", "muon": "sqrt", "sgd": "linear"}
"""How the learning rate follows the batch, by optimizer. One that is not here has no rule for a growing batch."""


@dataclass(frozen=True)
class StepBatch:
    """One step."""

    samples: int
    """Samples of a step, over all ranks and replica groups."""
    lr: float


@dataclass(frozen=True)
class BatchStage:
    """A size, and the progress from which it holds."""

    from_samples: int
    """Samples trained before the first step of this size."""
    step_samples: int


@dataclass(frozen=True)
class BatchPhase:
    """Steps of one size."""

    step_samples: int
    """The very last step of a run may have fewer or more."""
    steps: int


@dataclass(frozen=True)
class BatchSchedule:
    """The sizes of a run's steps, resolved from its recipe by `schedule_batches`."""

    optim: OptimSpec
    max_steps: int
    """Steps that the run would make at the starting size."""
    start_samples: int
    """Samples of the first step, and the fewest of any."""
    lr_rule: ShrinkRule
    stages: tuple[BatchStage, ...]
    """The first is from 0 on. One alone for `noise`, which decides while it runs (`balance/batch/noise.py`)."""

    @property
    def run_samples(self) -> int:
        """Samples that the run trains. It is over when it has."""
        return self.max_steps * self.start_samples

    def size_at(self, samples: int) -> int:
        """Return the samples of a step that begins after `samples`, but for the last step."""
        return self.stages[bisect_right(self.stages, samples, key=lambda stage: stage.from_samples) - 1].step_samples


def schedule_batches(spec: RunSpec) -> BatchSchedule:
    """Return the batch schedule of a recipe that `spec.rules` found no fault with."""
    batching, rule = spec.batching, spec.batching.schedule.lr_rule
    return BatchSchedule(
        optim=spec.optim,
        max_steps=spec.train.max_steps,
        start_samples=batching.global_batch_size,
        lr_rule=OPTIMIZER_RULES.get(spec.optim.name, "none") if rule == "optimizer" else rule,
        stages=(BatchStage(0, batching.global_batch_size), *_later_stages(spec)),
    )


def step_batch(schedule: BatchSchedule, samples: int, size: int | None = None) -> StepBatch:
    """Return the step that begins after `samples` have been trained.

    `size`: the samples that a step has by now where they are decided while the run goes on (`noise`).
    The last step takes what is left, and with it what would be less than the starting size after it.
    Raises ValueError where nothing is left.
    """
    left = schedule.run_samples - samples
    if left <= 0:
        raise ValueError(f"the run has trained its {schedule.run_samples} samples: no step follows")
    wanted = schedule.size_at(samples) if size is None else size
    taken = left if left < wanted + schedule.start_samples else wanted
    start = schedule.start_samples
    middle = samples / start + (taken / start - 1) / 2
    lr = learning_rate(schedule.optim.schedule, schedule.optim.lr, middle, schedule.max_steps)
    return StepBatch(taken, lr * lr_factor(schedule.lr_rule, taken, start))


def run_phases(schedule: BatchSchedule) -> tuple[BatchPhase, ...]:
    """Return the steps of the whole run by size, in their order; exact, except for `noise`, which makes no more."""
    return tuple(_phases(schedule))


def count_steps(schedule: BatchSchedule) -> int:
    """Return the number of steps of the run: exact, except for `noise`, which makes no more."""
    return sum(phase.steps for phase in _phases(schedule))


def _phases(schedule: BatchSchedule) -> Iterator[BatchPhase]:
    """Count in whole stages: a run may have 10^12 steps."""
    trained, total, start = 0, schedule.run_samples, schedule.start_samples
    ends = [stage.from_samples for stage in schedule.stages[1:]] + [total]
    for stage, end in zip(schedule.stages, ends, strict=True):
        size = stage.step_samples
        until_end = -(-(min(end, total) - trained) // size)
        before_last = (total - trained - start) // size
        steps = min(until_end, before_last)
        trained += max(0, steps) * size
        is_last = before_last < until_end
        if steps + is_last > 0:
            yield BatchPhase(size, steps + is_last)
        if is_last:
            return


def _later_stages(spec: RunSpec) -> tuple[BatchStage, ...]:
    if spec.batching.schedule.kind == "ramp":
        return tuple(
            BatchStage(-(-stage.from_tokens // spec.data.seq_len), stage.global_batch_size)
            for stage in spec.batching.schedule.stages
        )
    return _seesaw_stages(spec) if spec.batching.schedule.kind == "seesaw" else ()


def _seesaw_stages(spec: RunSpec) -> tuple[BatchStage, ...]:
    """Each size of the ladder holds from where the schedule has multiplied the rate by B0 / size or less."""
    start, lr = spec.batching.global_batch_size, spec.optim.schedule
    after_warmup = range(lr.warmup_steps, spec.train.max_steps)
    stages = []
    largest = min(largest_size(spec), start * spec.train.max_steps)
    for size in spec.batching.sizes_up_to(largest)[1:]:
        reached = bisect_left(
            after_warmup, -start / size, key=lambda step: -learning_rate(lr, 1.0, step, spec.train.max_steps)
        )
        if reached < len(after_warmup):
            stages.append(BatchStage((lr.warmup_steps + reached) * start, size))
    return tuple(stages)
