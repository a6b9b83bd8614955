"""The batch of a step, and its division into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.field_types import AUTO, AutoInt, PositiveInt

OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: PositiveInt
    """Samples per step, over all ranks. They are divided as evenly as whole ones can be, over any number of ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples that a rank processes in one forward and backward, at most; the rest is gradient accumulation."""
    on_loss: OnLoss = "keep"
    """While a replica group is away: keep the global batch (the others process its samples too, in more micro-batches
    where they need them), or shrink it in proportion to the groups that are left."""
    shrink_lr: ShrinkRule = "linear"
    """Factor on the learning rate for a smaller batch: in proportion (arXiv:1706.02677), with its square root
    (arXiv:2205.10287), or not at all."""
