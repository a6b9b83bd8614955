"""The optimizer and its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class ScheduleSpec:
    """Learning rate over the run, a pure function of the step (see `policy/schedule.py`)."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_fraction: float = 0.2
    """wsd: the last fraction of the run, over which the rate falls."""
    final_lr_ratio: float = 0.1
    """The rate at the last step, as a fraction of the peak."""


@dataclass(frozen=True)
class OptimSpec:
    lr: float
    name: Literal["adamw", "sgd"] = "adamw"
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    """Applied only to matrices (not to norms and biases)."""
    grad_clip_norm: float | None = 1.0
    schedule: ScheduleSpec = field(default_factory=ScheduleSpec)
