"""What a run does about failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, AutoInt

RecoveryMode = Literal["restart", "elastic", "none"]


@dataclass(frozen=True)
class ResilienceSpec:
    mode: RecoveryMode = "restart"
    """restart: a failure ends all processes, and the run starts again from its last checkpoint.

    elastic: the replica groups that survive step on, and the failed one comes back and heals from them.

    none: the first failure ends the run.
    """
    replica_groups: AutoInt = AUTO
    """elastic: groups of processes that each hold the whole model, in a layout of their own; auto is
    `layout.dp_replicate` where that is given, else 2 (the planner tries several).

    On several hosts each takes whole ones, or several share one. The first host, where the supervisor and the groups'
    meeting point are, must not be lost."""
    min_groups: int = 1
    """elastic: with fewer groups than this the run waits for them; where none can come back, it ends."""
    max_restarts_per_hour: int = 6
    """Of each group (elastic) or of the whole run (restart); a group that fails more often stays away."""
    hang_floor_s: float | None = 120.0
    """A step that takes this long, and five times as long as the slowest before it, is hung, and ends the run with the
    ranks' stacks; null waits for ever."""
    heartbeat_timeout_s: float = 3.0
    """elastic: a group that is silent for this long counts as dead: its host is off, its link cut, its process stopped.

    A killed one is noticed at once, by its closed connection. Heartbeats come from a Python thread, which a native call
    that holds the interpreter keeps waiting."""
    exchange_timeout_s: float = 60.0
    """elastic: in an exchange of gradients the groups wait this long for one that lives, but does not come."""
    sdc_check: int | None = None
    """elastic: steps between comparisons of the groups' parameters (silent data corruption); null never compares."""
