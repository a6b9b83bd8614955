"""What a run does about failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RecoveryMode = Literal["restart", "elastic"]


@dataclass(frozen=True)
class ResilienceSpec:
    mode: RecoveryMode = "restart"
    """restart: every failure ends the job, which starts again from its last checkpoint.

    elastic: the replica groups (`layout.dp_replicate`) that survive step on, and the failed one heals from them.
    """
    min_replica_groups: int = 1
    """elastic: with fewer groups than this the run waits for them instead of stepping on."""
