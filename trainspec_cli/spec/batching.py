"""How many samples a step takes, and how they are cut."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.auto import AUTO, AutoInt


@dataclass(frozen=True)
class BatchingSpec:
    global_batch_size: int
    """Samples a step, over all ranks."""
    micro_batch_size: AutoInt = AUTO
    """Samples a rank takes through one forward and backward; the rest is gradient accumulation."""
