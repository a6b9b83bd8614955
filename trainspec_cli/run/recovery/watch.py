"""Decide when a step hangs, and which rank the others are waiting for. All inputs are plain numbers and records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from trainspec_cli.recipe.results.verdict import Collective
from trainspec_cli.run.recovery.collectives import find_mismatch, find_missing

SLOWER = 5.0
"""A step may take this many times as long as the slowest of the recent ones."""
STALL_SLOWER, STALL_FLOOR_S = 2.5, 2.0
"""A step is reported as stalled when it takes this many times as long as usual and at least this many seconds."""
STALL_MARGIN_S = 8.0
"""Slow steps are reported as stalled when they take this many seconds longer than usual."""
STANDING_S = 6.0
"""A collective that does not end for this many seconds is reported, even if the step may take longer. If the ranks have
called different collectives, it will never end."""
LEARNING_STEPS = 3
FIRST_S = 1800.0
"""Default time limit between steps, also used until a program's own step times are known (the first steps include
compilation)."""
READING_THREAD = "loader"
"""Name prefix of the threads that read batches, so that a hang can be attributed to them."""
CHECKPOINT = "its checkpoint"
"""The value of `waits_in` while a rank writes a checkpoint, or waits for other ranks to write theirs."""
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
    slowest_s = max(recent_s)
    return min(deadline_s / 2, max(STALL_FLOOR_S, min(STALL_SLOWER * slowest_s, slowest_s + STALL_MARGIN_S)))


@dataclass(frozen=True)
class Whereabouts:
    """The position of a rank in a hanging step."""

    waiting: bool
    """True if the rank is in a collective, or is waiting for the device to finish one."""
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Number of the last collective that the rank entered, for each process group."""
    entered: Sequence[Collective] = ()
    """The newest collectives of each process group, if a flight recorder is on."""
    line: str = ""
    """The innermost line of the rank's own code, if known."""


def find_late(found: Mapping[int, Whereabouts], world_size: int) -> tuple[list[int], str]:
    """Return the ranks that the others are waiting for, and the reason; no ranks if all wait in the same collectives,
    or if the ranks have called different ones and none of these is more frequent."""
    called = {rank: place.entered for rank, place in found.items()}
    if (mismatch := find_mismatch(called)) is not None:
        return list(mismatch.ranks), mismatch.why
    if silent := [rank for rank in range(world_size) if rank not in found]:
        return silent, f"it does not respond{_missing(called, silent)}"
    if elsewhere := sorted(rank for rank, place in found.items() if not place.waiting):
        if len(elsewhere) < world_size:
            lines = sorted({line for rank in elsewhere if (line := found[rank].line)})
            at = f", but at {' and at '.join(lines[:2])}" if lines else ""
            return elsewhere, f"it is in no collective{at}{_missing(called, elsewhere)}"
        return [], "no rank waits for another"
    furthest: dict[str, int] = {}
    for place in found.values():
        for group, number in place.collectives.items():
            furthest[group] = max(furthest.get(group, 0), number)
    behind = [rank for rank, place in found.items() if any(n < furthest[g] for g, n in place.collectives.items())]
    behind.sort()
    if behind and len(behind) < world_size:
        return behind, f"it has entered fewer collectives{_missing(called, behind)}"
    if behind:
        return [], "the ranks wait for one another, in collectives of different groups"
    return [], "all ranks wait in the same collective"


def _missing(called: Mapping[int, Sequence[Collective]], ranks: Sequence[int]) -> str:
    one = find_missing(called, ranks)
    return f"; it has not called number {one.number} of group {one.group}, {one.text}" if one else ""


def short_line(stack: str) -> str:
    """Return the innermost line of a printed stack without the file's folder."""
    return innermost_line(stack).rpartition("/")[2]


def innermost_line(stack: str) -> str:
    """Return the innermost line of a printed stack, as `FILE:LINE in FUNCTION`; empty without a stack. Lines of
    `traceback` are ordered from the outermost to the innermost, those of `faulthandler` the other way round."""
    if innermost_last := _FRAME.findall(stack):
        file, line, function = innermost_last[-1]
    elif innermost_first := _FAULT_FRAME.findall(stack):
        file, line, function = innermost_first[0]
    else:
        return ""
    return f"{file}:{line} in {function}"


_FRAME = re.compile(r'^  File "(.*)", line (\d+), in (.*)$', re.MULTILINE)
_FAULT_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)


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
