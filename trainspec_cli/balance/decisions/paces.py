"""How much longer than usual each rank computes, whatever work its layout gives it.

Ranks of one pipeline stage do the same work, so what is usual is learnt from them together: the median. It is learnt
once for each layout, with what was known of the ranks before: a rank that has a stage to itself after a change of
layout is as slow as it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_low

from trainspec_cli.recipe.keys.layout import Layout


class PaceTracker:
    def __init__(self, change: float):
        """`change`: a rank that differs from what is usual by no more than this fraction computes as usual."""
        self._change = change
        self._paces: tuple[float, ...] = ()
        self._layout: Layout | None = None
        self._usual_s: list[float] = []
        """The usual seconds of each pipeline stage's ranks."""

    def note(self, layout: Layout, times_s: Sequence[float]) -> tuple[float, ...]:
        """Take in what each global rank computes in a step of evenly many samples; return how many times as long as
        usual that is, 1 for what counts as usual."""
        rows = [times_s[slice(*place)] for place in _stages(layout)]
        if layout != self._layout:
            known = self._paces if len(self._paces) == len(times_s) else (1.0,) * len(times_s)
            paces = [known[slice(*place)] for place in _stages(layout)]
            self._layout, self._usual_s = layout, list(map(_usual_s, rows, paces))
        ratios = [time_s / usual_s for row, usual_s in zip(rows, self._usual_s, strict=True) for time_s in row]
        self._paces = tuple(1.0 if abs(ratio - 1) <= self._change else ratio for ratio in ratios)
        return self._paces


def _stages(layout: Layout) -> list[tuple[int, int]]:
    """Return the first global rank of each pipeline rank, and the one after its last: `pp` is the outermost axis."""
    size = layout.world_size // layout.pp
    return [(stage * size, (stage + 1) * size) for stage in range(layout.pp)]


def _usual_s(times_s: Sequence[float], paces: Sequence[float]) -> float:
    return median_low(time_s / pace for time_s, pace in zip(times_s, paces, strict=True))
