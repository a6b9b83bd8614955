"""The response to failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.auto import AUTO, AutoInt
from trainspec_cli.spec.numbers import NonNegativeInt, PositiveFloat, PositiveInt

RecoveryMode = Literal["restart", "elastic", "none"]


@dataclass(frozen=True)
class ResilienceSpec:
    mode: RecoveryMode = "restart"
    """restart: a failure ends all processes, and the run restarts from its last checkpoint.

    elastic: the surviving replica groups continue, and the failed one restarts and heals from them.

    none: the first failure ends the run.
    """
    replica_groups: AutoInt = AUTO
    """elastic: replica groups, each a set of processes with the whole model in a layout of its own; auto is
    `layout.dp_replicate` if that is given, else 2 (the planner tries several).

    On several nodes each replica group takes whole nodes, or several share one. The first node, which runs the
    supervisor and the rendezvous server, must not be lost."""
    min_groups: PositiveInt = 1
    """elastic: with fewer replica groups than this the run waits; if none can come back, it ends."""
    max_restarts_per_hour: NonNegativeInt = 6
    """The limit for each replica group (elastic) or the whole run (restart); a group that fails more often stays
    down."""
    hang_floor_s: PositiveFloat | None = 120.0
    """A step that takes this long, and five times as long as the slowest before it, has hung; it ends the run with the
    ranks' stacks. null waits forever."""
    heartbeat_timeout_s: PositiveFloat = 3.0
    """elastic: a replica group silent for this long counts as dead (its node is off, cut off, or its process stopped).

    A killed one is noticed at once, by its closed connection. Heartbeats come from a Python thread, which a native call
    that holds the interpreter lock delays."""
    exchange_timeout_s: PositiveFloat = 60.0
    """elastic: how long a gradient exchange waits for a replica group that is alive but does not take part."""
    sdc_check: PositiveInt | None = None
    """elastic: steps between comparisons of the groups' parameters (silent data corruption); null never compares."""
