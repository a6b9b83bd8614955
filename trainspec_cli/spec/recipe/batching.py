"""How many samples a step takes, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, AutoInt

OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: int
    """Samples a step, over all ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples a rank takes through one forward and backward; the rest is gradient accumulation."""
    on_loss: OnLoss = "keep"
    """While a replica group is away: keep the global batch, the others take its samples in more micro-batches; or
    shrink it by what the group would have taken."""
    shrink_lr: ShrinkRule = "linear"
    """How the learning rate follows a batch that shrank: in proportion (arXiv:1706.02677), with its square root
    (arXiv:2205.10287), or not at all."""
