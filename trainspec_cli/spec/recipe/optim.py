"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.spec.field_types import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Range


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over the run, a pure function of the step (see `policy/schedule.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_fraction: Fraction = 0.2
    """wsd: the last fraction of the run, over which the rate falls."""
    final_lr_ratio: Fraction = 0.1
    """The rate at the last step, as a fraction of the peak."""

    @property
    def lowest_lr_ratio(self) -> float:
        """The rate that the schedule falls to, as a fraction of the peak; 1 where it does not fall."""
        falls = self.kind == "cosine" or (self.kind == "wsd" and self.decay_fraction > 0)
        return self.final_lr_ratio if falls else 1.0


@dataclass(frozen=True)
class OptimSpec:
    lr: PositiveFloat
    name: Literal["adamw", "sgd"] = "adamw"
    beta1: Annotated[float, Range(0, 1, includes_high=False)] = 0.9
    beta2: Annotated[float, Range(0, 1, includes_high=False)] = 0.95
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.1
    """Applied only to matrices (not to norms and biases)."""
    grad_clip_norm: PositiveFloat | None = 1.0
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
