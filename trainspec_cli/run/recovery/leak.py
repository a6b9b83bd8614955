"""Detect memory that grows from step to step and will run out, while there is still some left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

WINDOW = 48
"""The number of readings that a verdict is based on."""
STEADY = 0.8
"""Fraction of neighbouring eighths that must grow: caches fill and then stay, leaks go on."""
EIGHTHS = 8


def slope_per_step(steps: Sequence[int], readings_bytes: Sequence[float]) -> float:
    """Return bytes per step: the median over pairs half a window apart (Theil and Sen), robust to single jumps."""
    half = len(steps) // 2
    pairs = zip(range(half), range(half, 2 * half), strict=True)
    return median((readings_bytes[b] - readings_bytes[a]) / (steps[b] - steps[a]) for a, b in pairs)


def grows_steadily(readings_bytes: Sequence[float]) -> bool:
    """Return True if nearly every eighth of the window lies above the one before."""
    size = len(readings_bytes) // EIGHTHS
    levels = [median(readings_bytes[i * size : (i + 1) * size]) for i in range(EIGHTHS)]
    rises = sum(after > before for before, after in pairwise(levels))
    return rises >= STEADY * (EIGHTHS - 1)


def steps_until_full(steps: Sequence[int], readings_bytes: Sequence[float], free_bytes: float) -> float | None:
    """Return the steps until a leak has taken `free_bytes`; None if a full window shows no leak."""
    if len(readings_bytes) < WINDOW or not grows_steadily(readings_bytes):
        return None
    slope = slope_per_step(steps, readings_bytes)
    return free_bytes / slope if slope > 0 else None
