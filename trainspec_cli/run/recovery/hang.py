"""Decide when a step has hung, and which rank the others wait for, on plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOWER = 5.0
"""A step may take this many times as long as the slowest of the recent ones."""
STALL_SLOWER, STALL_FLOOR_S = 2.5, 2.0
"""A step is reported as stalled when it takes so many times as long, and so long at least."""
LEARNING_STEPS = 3
FIRST_S = 1800.0
"""The usual limit until a program's own steps are known (the first ones compile), and between steps."""
READING_THREAD = "loader"
"""The prefix of the names of threads that read batches, by which a hang is traced to them."""
NOTE_S = 120.0
"""A first step that takes this long is reported with what it waits for, long before its limit."""


def step_deadline_s(recent_s: Sequence[float], floor_s: float, first_s: float = FIRST_S) -> float:
    """Return the time limit of a step, learned from those before it; never below `floor_s`. Until there are steps to
    learn from (the first ones compile) it is `first_s`."""
    if len(recent_s) < LEARNING_STEPS:
        return max(first_s, floor_s)
    return max(floor_s, SLOWER * max(recent_s))


def stall_after_s(recent_s: Sequence[float], deadline_s: float) -> float:
    """Return the time after which a step is reported that may come to hang, long before `deadline_s` ends the run."""
    if len(recent_s) < LEARNING_STEPS:
        return math.inf
    return min(deadline_s / 2, max(STALL_FLOOR_S, STALL_SLOWER * max(recent_s)))


@dataclass(frozen=True)
class Whereabouts:
    """The position of a rank in a step that hangs."""

    waiting: bool
    """True in a collective, or while waiting for the device to finish one."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """The number of the last collective that it entered, by process group."""


def find_late(found: Mapping[int, Whereabouts], world_size: int) -> tuple[list[int], str]:
    """Return the ranks that the others wait for, and why; none if all wait in the same collectives."""
    if silent := [rank for rank in range(world_size) if rank not in found]:
        return silent, "it gives no sign of life"
    if elsewhere := [rank for rank, place in found.items() if not place.waiting]:
        if len(elsewhere) < world_size:
            return sorted(elsewhere), "it is in no collective"
        return [], "no rank waits for another"
    furthest: dict[str, int] = {}
    for place in found.values():
        for group, number in place.collectives.items():
            furthest[group] = max(furthest.get(group, 0), number)
    behind = [rank for rank, place in found.items() if any(n < furthest[g] for g, n in place.collectives.items())]
    if behind and len(behind) < world_size:
        return sorted(behind), "it has entered fewer collectives"
    return [], "all ranks wait in the same collective"
