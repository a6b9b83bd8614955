"""The batch of a step, and its division into micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, AutoInt
from trainspec_cli.spec.numbers import PositiveInt

OnLoss = Literal["keep", "shrink"]
ShrinkRule = Literal["linear", "sqrt", "none"]


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: PositiveInt
    """Samples per step, over all ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples that a rank processes in one forward and backward; the rest is gradient accumulation."""
    on_loss: OnLoss = "keep"
    """While a replica group is away: keep the global batch (the others process its samples in more micro-batches), or
    shrink it by the group's samples."""
    shrink_lr: ShrinkRule = "linear"
    """Scaling of the learning rate for a smaller batch: in proportion (arXiv:1706.02677), with its square root
    (arXiv:2205.10287), or not at all."""
