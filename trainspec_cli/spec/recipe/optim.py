"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from trainspec_cli.spec.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, Range


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over the run, a pure function of the step (see `policy/schedule.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: NonNegativeInt = 0
    decay_fraction: Fraction = 0.2
    """wsd: the last fraction of the run, over which the rate falls."""
    final_lr_ratio: Fraction = 0.1
    """The rate at the last step, as a fraction of the peak."""


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
