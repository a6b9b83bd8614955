"""The number of samples and the learning rate of each step, set by a schedule or by the gradient noise.

All functions are pure: they depend only on the step, the number of samples trained on so far, and averages stored in
checkpoints, so a resumed run needs no other state."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.balance.batch.division import lr_factor
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, ScheduleSpec, ShrinkRule
from trainspec_cli.recipe.rules.run import largest_size


def learning_rate(schedule: ScheduleSpec, peak_lr: float, step: float, max_steps: int) -> float:
    """Return the learning rate of update `step` (the first is 0) in a run of `max_steps`.

    `step` may lie between two updates, because one large step counts as several steps of the starting size.
    """
    if step < schedule.warmup_steps:
        return min(peak_lr, peak_lr * (step + 1) / schedule.warmup_steps)
    if schedule.kind == "constant":
        return peak_lr
    begin = schedule.warmup_steps
    if schedule.kind == "wsd":
        # Constant at 1, then linear decay over the last `decay_fraction` (WSD; MiniCPM, arXiv:2404.06395).
        begin = max(begin, round(max_steps * (1 - schedule.decay_fraction)))
        if step < begin:
            return peak_lr
    # Progress of the decay: 0 at `begin`, 1 at the last update.
    done = min(1.0, (step - begin) / max(1, max_steps - 1 - begin))
    ratio = schedule.final_lr_ratio
    if schedule.kind == "wsd":
        return peak_lr * (1 - (1 - ratio) * done)
    # Half a cosine from 1 to `final_lr_ratio` (SGDR, arXiv:1608.03983, eq. 5).
    return peak_lr * (ratio + (1 - ratio) * (1 + math.cos(math.pi * done)) / 2)


# The number of samples and the learning rate of each step, as pure functions of the number of samples trained on so
# far.
#
# Under every schedule, a run trains on `train.max_steps` x `batching.global_batch_size` samples, and ends with the step
# that trains on the last sample. A step of B samples counts as B / B0 steps of the starting size B0. Its learning rate
# is that of `optim.schedule` in the middle of these steps, times f(B / B0), where f is `batching.schedule.lr_rule`.
#
# A growing batch therefore replaces part of the schedule's decay. When the schedule multiplies the rate by a, a batch
# of B0 / a multiplies it by a f(1/a) instead: sqrt(a) for AdamW, as in Seesaw (arXiv:2510.14717), and 1 for SGD
# (arXiv:1711.00489; arXiv:2510.14717, theorem 1). The number of steps is multiplied by the mean of a: it halves for a
# cosine that ends at 0, and falls by 1 - 2/pi for a quarter of a cosine.


OPTIMIZER_RULES: Mapping[str, ShrinkRule] = {"adamw": "sqrt", "adamw8bit": "sqrt", "muon": "sqrt", "sgd": "linear"}
"""The scaling of the learning rate with the batch, by optimizer. Other optimizers have no rule for a growing batch."""


@dataclass(frozen=True)
class StepBatch:
    """The size and learning rate of one step."""

    samples: int
    """Number of samples, summed over all ranks and replica groups."""
    lr: float


@dataclass(frozen=True)
class BatchStage:
    """A batch size and the progress at which it starts."""

    from_samples: int
    """Number of samples trained on before the first step of this size."""
    step_samples: int


@dataclass(frozen=True)
class BatchPhase:
    """Consecutive steps of the same size."""

    step_samples: int
    """Number of samples per step; only the last step of the run may have fewer or more."""
    steps: int


@dataclass(frozen=True)
class BatchSchedule:
    """The batch sizes of a run, resolved from its recipe by `schedule_batches`."""

    optim: OptimSpec
    max_steps: int
    """Number of steps that the run would take at the starting size."""
    start_samples: int
    """Number of samples in the first step, which is the smallest."""
    lr_rule: ShrinkRule
    stages: tuple[BatchStage, ...]
    """The batch sizes in order; the first one starts at 0 samples. A `noise` schedule has only one stage, because it
    chooses batch sizes during the run."""

    @property
    def run_samples(self) -> int:
        """Number of samples after which the run ends."""
        return self.max_steps * self.start_samples

    def size_at(self, samples: int) -> int:
        """Return the size of a step that starts after `samples`; the last step may differ."""
        return self.stages[bisect_right(self.stages, samples, key=lambda stage: stage.from_samples) - 1].step_samples


def schedule_batches(spec: RunSpec) -> BatchSchedule:
    """Return the batch schedule of a recipe that has passed the checks in `recipe.rules`."""
    batching = spec.batching
    rule = batching.schedule.lr_rule
    later: Sequence[BatchStage] = ()
    if batching.schedule.kind == "ramp":
        seq_len = spec.data.seq_len
        later = [BatchStage(-(-one.from_tokens // seq_len), one.global_batch_size) for one in batching.schedule.stages]
    elif batching.schedule.kind == "seesaw":
        later = _seesaw_stages(spec)
    return BatchSchedule(
        optim=spec.optim,
        max_steps=spec.train.max_steps,
        start_samples=batching.global_batch_size,
        lr_rule=OPTIMIZER_RULES.get(spec.optim.name, "none") if rule == "optimizer" else rule,
        stages=(BatchStage(0, batching.global_batch_size), *later),
    )


def step_batch(schedule: BatchSchedule, samples: int, size: int | None = None) -> StepBatch:
    """Return the step that starts after training on `samples` samples.

    `size`: the current batch size of a schedule that is decided during the run (`noise`). The last step takes all
    remaining samples, even those that would otherwise form another step below the starting size. Raises ValueError if
    no samples remain.
    """
    left = schedule.run_samples - samples
    if left <= 0:
        raise ValueError(f"the run has trained on all its {schedule.run_samples} samples; no step remains")
    wanted = schedule.size_at(samples) if size is None else size
    taken = left if left < wanted + schedule.start_samples else wanted
    start = schedule.start_samples
    middle = samples / start + (taken / start - 1) / 2
    lr = learning_rate(schedule.optim.schedule, schedule.optim.lr, middle, schedule.max_steps)
    return StepBatch(taken, lr * lr_factor(schedule.lr_rule, taken, start))


def run_phases(schedule: BatchSchedule) -> tuple[BatchPhase, ...]:
    """Return the run's steps grouped by size, in order. The result is exact, except for `noise`, where it is an upper
    bound."""
    return tuple(_phases(schedule))


def count_steps(schedule: BatchSchedule) -> int:
    """Return the number of steps in the run. The result is exact, except for `noise`, where it is an upper bound."""
    return sum(phase.steps for phase in _phases(schedule))


def _phases(schedule: BatchSchedule) -> Iterator[BatchPhase]:
    """Yield the phases. The steps of a stage are counted together rather than one by one, because a run may have 10^12
    steps."""
    trained = 0
    total = schedule.run_samples
    start = schedule.start_samples
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


def _seesaw_stages(spec: RunSpec) -> list[BatchStage]:
    """Return the stages: each size starts once the schedule has reduced the learning rate to at most B0 / size times
    its peak."""
    start = spec.batching.global_batch_size
    lr = spec.optim.schedule
    after_warmup = range(lr.warmup_steps, spec.train.max_steps)
    stages = []
    largest = min(largest_size(spec), start * spec.train.max_steps)
    for size in spec.batching.sizes_up_to(largest)[1:]:
        reached = bisect_left(
            after_warmup, -start / size, key=lambda step: -learning_rate(lr, 1.0, step, spec.train.max_steps)
        )
        if reached < len(after_warmup):
            stages.append(BatchStage((lr.warmup_steps + reached) * start, size))
    return stages


# The gradient noise scale, measured from data that data-parallel ranks exchange anyway, and the batch size derived from
# it.
#
# The gradient of one sample has the mean mu and the covariance S. Suppose n ranks share B samples, and rank i has the
# fraction w_i of them (the w_i sum to 1). Its mean gradient g_i has E|g_i|^2 = |mu|^2 + tr S / (w_i B), and their sum g
# = sum w_i g_i has E|g|^2 = |mu|^2 + tr S / B. Solving the two equations yields tr S and |mu|^2; B_noise = tr S /
# |mu|^2 is the simple noise scale (McCandlish et al., arXiv:1812.06162). Both values are sums over parameters. Groups
# of parameters may divide the samples differently: an expert trains on the samples of several ranks.


@dataclass(frozen=True)
class NoiseMeasurement:
    """Unbiased estimates from one step. Each may be far off, and even negative."""

    trace: float
    """tr S: variance of one sample's gradient, summed over the parameters."""
    square: float
    """|mu|^2: squared norm of the expected gradient."""


@dataclass(frozen=True)
class PartSquares:
    """Squared norms of one step's gradient before clipping, for parameters whose samples are split into parts in the
    same way."""

    weighted_square: float
    """Sum of w_i |g_i|^2 over the parts, with g_i the mean gradient of a part and w_i its fraction of the step."""
    square: float
    """|g|^2 of the mean gradient over all samples."""
    parts: int
    """Number of micro-batches with samples."""


def measure_noise(samples: int, squares: Sequence[PartSquares]) -> NoiseMeasurement:
    """Estimate the noise of one step's gradient. Raises ValueError for fewer than two parts, because noise is measured
    from the differences between parts.
    """
    if (fewest := min(of.parts for of in squares)) < 2:
        raise ValueError(
            f"gradient noise is measured from the differences between parts, but only {fewest} had samples"
        )
    trace = sum(samples * (of.weighted_square - of.square) / (of.parts - 1) for of in squares)
    return NoiseMeasurement(trace, sum(of.square for of in squares) - trace / samples)


@dataclass(frozen=True)
class NoiseAverage:
    """Exponential averages of a run's measurements."""

    trace: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    """Sum of the measurements' weights, which approaches 1. It is used to correct the bias of averages that start at
    0."""

    def updated(self, measured: NoiseMeasurement, smoothing_steps: int) -> NoiseAverage:
        """Return the averages after one more step, which has a weight of 1 / `smoothing_steps`.

        A measurement that is not finite is skipped, like the optimizer update of that step.
        """
        if not (math.isfinite(measured.trace) and math.isfinite(measured.square)):
            return self
        part = 1 / smoothing_steps
        return NoiseAverage(
            self.trace + part * (measured.trace - self.trace),
            self.square + part * (measured.square - self.square),
            self.weight + part * (1 - self.weight),
        )

    @property
    def mean(self) -> NoiseMeasurement | None:
        """Return the bias-corrected averages; None before the first measurement."""
        return NoiseMeasurement(self.trace / self.weight, self.square / self.weight) if self.weight else None

    @property
    def settled(self) -> bool:
        """Return whether at least `smoothing_steps` steps have been measured.

        After n steps of weight 1/n, the sum of weights is 1 - (1 - 1/n)^n, which is 1 - 1/e or slightly more.
        """
        return self.weight >= 1 - math.exp(-1)

    @property
    def noise_scale(self) -> float | None:
        """Return B_noise in samples; None before the first measurement; infinite if noise hides |mu|^2.

        It is a ratio of averages, because an average of ratios would be biased.
        """
        mean = self.mean
        if mean is None:
            return None
        return max(0.0, mean.trace) / mean.square if mean.square > 0 else math.inf


@dataclass(frozen=True)
class BatchPace:
    """The state of a run's batch schedule. Checkpoints store it, so that a resumed run makes the same decisions."""

    size: int
    """Current batch size of the `noise` schedule, in samples."""
    noise: NoiseAverage


def next_size(batching: BatchingSpec, size: int, noise_scale: float | None) -> int:
    """Return the batch size that follows `size` in the `noise` schedule. Called every `interval_steps` steps. The
    target is `noise_fraction` of the noise scale. The size goes up by one stage when the target reaches the next size,
    and down by one when it falls below the previous size. Otherwise, or without a measurement, the size stays the same.
    This hysteresis absorbs measurement noise."""
    sizes = batching.sizes_up_to(batching.schedule.max_global_batch_size or batching.global_batch_size)
    place = max(0, bisect_right(sizes, size) - 1)
    if noise_scale is None:
        return sizes[place]
    aim = batching.schedule.noise_fraction * noise_scale
    if place + 1 < len(sizes) and aim >= sizes[place + 1]:
        return sizes[place + 1]
    return sizes[place - 1] if place and aim < sizes[place - 1] else sizes[place]


GROWS_BY_ITSELF = ("ramp", "seesaw")
"""Schedules where the batch grows regardless of the noise."""
EQUIVALENT_FRACTION = 0.5
"""Up to this fraction of the noise scale B_n, a larger batch at a larger learning rate trains nearly as well as the
starting size.

Scaling the rate with the square root of the batch is exact if noise dominates the gradient. Otherwise AdamW's
denominator shrinks less. For equal progress, the rate at B would have to be larger by a further factor of sqrt((B_n +
B) / (B_n + B0)), which is up to 1.22 at B = B_n / 2. Measured (docs/benchmarks.md): no loss at a sixth of B_n, 0.4% at
a third, 1% at two thirds."""


def outgrows_noise(batching: BatchingSpec, samples: int, noise: NoiseAverage) -> bool:
    """Return whether a schedule has grown the batch to more than half the gradient noise scale.

    A larger batch with a larger rate trains like a smaller batch with a smaller rate as long as the noise outweighs the
    gradient (arXiv:2205.10287; arXiv:2510.14717). Returns False until the averages are settled.
    """
    grown = batching.schedule.kind in GROWS_BY_ITSELF and samples > batching.global_batch_size
    scale = noise.noise_scale
    return grown and noise.settled and scale is not None and samples > EQUIVALENT_FRACTION * scale
