"""The batch of a step, how it changes over the run, and its division into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.recipe.field_types import AUTO, AutoInt, PositiveFloat, PositiveInt, Range

OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class RampStage:
    """One stage of a ramp."""

    from_tokens: PositiveInt
    """Tokens trained when the stage begins (samples, for images and volumes)."""
    global_batch_size: PositiveInt
    """Samples per step from then on."""


@dataclass(frozen=True)
class BatchScheduleSpec:
    """How the batch changes over the run (see `policy/batch/batch_schedule.py`).

    A run begins with `batching.global_batch_size` samples a step and trains `train.max_steps` times as many, whatever
    the schedule: progress is counted in samples, and a batch that grows makes fewer steps of them. The learning rate
    follows `optim.schedule`, whose steps are of the first size, over the samples, times a factor for the batch.
    """

    kind: Literal["constant", "ramp", "seesaw", "noise"] = "constant"
    """ramp: `stages`. seesaw: the batch grows by the factor that `optim.schedule` has taken off the learning rate
    (arXiv:2510.14717). noise: the batch follows the measured gradient noise scale (arXiv:1812.06162)."""
    lr_rule: Literal["optimizer", "sqrt", "linear", "none"] = "optimizer"
    """The factor on the learning rate for a larger batch: its square root (arXiv:2205.10287), in proportion
    (arXiv:1706.02677), or none. optimizer: linear for sgd, sqrt for all others."""
    stages: tuple[RampStage, ...] = ()
    """ramp: the sizes after the first, in their order."""
    growth: Annotated[float, Range(1.05, 16)] = 1.5
    """seesaw, noise: each size is the one before it times this, rounded to an eighth of the first."""
    max_global_batch_size: PositiveInt | None = None
    """seesaw, noise: the largest size; null, which seesaw alone may have: as large as the learning rate asks for."""
    interval_steps: PositiveInt = 100
    """noise: steps between decisions; each changes the size by one `growth` at most."""
    smoothing_steps: PositiveInt = 100
    """noise: steps that the measurements are averaged over (exponentially: the newest weighs 1 / smoothing_steps)."""
    noise_fraction: PositiveFloat = 1.0
    """noise: the size that is aimed at, as a fraction of the noise scale. At 1 a sample is worth half as much as in a
    small batch; at 0.25, four fifths."""


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: PositiveInt
    """Samples per step, over all ranks; with a `schedule`, of the first steps. They are divided as evenly as whole ones
    can be, over any number of ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples that a rank processes in one forward and backward, at most; the rest is gradient accumulation."""
    on_loss: OnLoss = "keep"
    """While a replica group is away: keep the global batch (the others process its samples too, in more micro-batches
    where they need them), or shrink it in proportion to the groups that are left."""
    shrink_lr: ShrinkRule = "linear"
    """Factor on the learning rate for a smaller batch: in proportion (arXiv:1706.02677), with its square root
    (arXiv:2205.10287), or not at all."""
    schedule: BatchScheduleSpec = field(default_factory=BatchScheduleSpec)
    """How the batch changes over the run."""

    def sizes_up_to(self, largest: float) -> tuple[int, ...]:
        """Return the sizes that `seesaw` and `noise` choose from: powers of `schedule.growth` times the first.

        They are rounded to eighths of the first, or to fourths, halves or wholes where it has no eighths: so they
        divide over ranks nearly as well as the first does.
        """
        first, growth = self.global_batch_size, self.schedule.growth
        part = first // math.gcd(first, 8)
        sizes, exact = [first], first * growth
        while exact <= largest and (rounded := round(exact / part) * part) <= largest:
            if rounded > sizes[-1]:
                sizes.append(rounded)
            exact *= growth
        return tuple(sizes)
