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
    hang_floor_s: float | None = 120.0
    """A step that takes this long, and five times as long as the slowest before it, is hung, and ends the run with the
    ranks' stacks; null waits for ever."""
    min_replica_groups: int = 1
    """elastic: with fewer groups than this the run waits for them instead of stepping on."""
