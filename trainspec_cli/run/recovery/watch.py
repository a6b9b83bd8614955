"""Decide when a step hangs, and which rank the others are waiting for. All inputs are plain numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

SLOWER = 5.0
"""A step may take this many times as long as the slowest of the recent ones."""
STALL_SLOWER, STALL_FLOOR_S = 2.5, 2.0
"""A step is reported as stalled when it takes this many times as long as usual and at least this many seconds."""
LEARNING_STEPS = 3
FIRST_S = 1800.0
"""Default time limit between steps, also used until a program's own step times are known (the first steps include
compilation)."""
READING_THREAD = "loader"
"""Name prefix of the threads that read batches, so that a hang can be attributed to them."""
NOTE_S = 120.0
"""If the first step takes this many seconds, it is reported together with what it is waiting for, long before its
limit."""


def step_deadline_s(recent_s: Sequence[float], floor_s: float, first_s: float = FIRST_S) -> float:
    """Return the time limit for a step, learned from the previous steps; at least `floor_s`. Before any step it is
    `first_s`, because the first steps include compilation."""
    if len(recent_s) < LEARNING_STEPS:
        return max(first_s, floor_s)
    return max(floor_s, SLOWER * max(recent_s))


def stall_after_s(recent_s: Sequence[float], deadline_s: float) -> float:
    """Return how long a step must take to be reported as possibly hanging. This is long before `deadline_s` ends the
    run."""
    if len(recent_s) < LEARNING_STEPS:
        return math.inf
    return min(deadline_s / 2, max(STALL_FLOOR_S, STALL_SLOWER * max(recent_s)))


@dataclass(frozen=True)
class Whereabouts:
    """The position of a rank in a hanging step."""

    waiting: bool
    """True if the rank is in a collective, or is waiting for the device to finish one."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of the last collective that the rank entered, for each process group."""


def find_late(found: Mapping[int, Whereabouts], world_size: int) -> tuple[list[int], str]:
    """Return the ranks that the others are waiting for, and the reason; no ranks if all wait in the same
    collectives."""
    if silent := [rank for rank in range(world_size) if rank not in found]:
        return silent, "it does not respond"
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


# Detect memory use that grows from step to step, before memory runs out.


WINDOW = 48
"""Number of memory readings that a verdict is based on."""
STEADY = 0.8
"""A leak must show growth in at least this fraction of the pairs of adjacent eighths of the window. Caches fill up and
then stay constant, whereas leaks continue."""
EIGHTHS = 8


def slope_per_step(steps: Sequence[int], readings_bytes: Sequence[float]) -> float:
    """Return the growth in bytes per step: the median over pairs half a window apart (Theil-Sen), which is robust to
    isolated jumps."""
    half = len(steps) // 2
    pairs = zip(range(half), range(half, 2 * half), strict=True)
    return median((readings_bytes[b] - readings_bytes[a]) / (steps[b] - steps[a]) for a, b in pairs)


def grows_steadily(readings_bytes: Sequence[float]) -> bool:
    """Return True if each eighth of the window, with few exceptions, is higher than the one before."""
    size = len(readings_bytes) // EIGHTHS
    levels = [median(readings_bytes[i * size : (i + 1) * size]) for i in range(EIGHTHS)]
    rises = sum(after > before for before, after in pairwise(levels))
    return rises >= STEADY * (EIGHTHS - 1)


def steps_until_full(steps: Sequence[int], readings_bytes: Sequence[float], free_bytes: float) -> float | None:
    """Return the number of steps until a leak has used up `free_bytes`; None if a full window does not show a leak."""
    if len(readings_bytes) < WINDOW or not grows_steadily(readings_bytes):
        return None
    slope = slope_per_step(steps, readings_bytes)
    return free_bytes / slope if slope > 0 else None
