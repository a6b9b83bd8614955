"""When a series is higher than it should be: smoothed against single outliers, held against its own noise, confirmed.

The noise is taken from the differences of neighbouring steps, which a change of level leaves alone however much of the
series lies behind it (a median absolute deviation from the series' median would count half of a long change as noise).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainspec_cli.report.diagnosis.evidence import Figures

SMOOTHED_STEPS = 5
CONFIRMING_STEPS = 3
"""A series lies above its limit in so many steps in a row, at least."""
CONFIRMING_S = 1.0
"""And for so long: other work of the machine that is over sooner slows no run."""
GAP_STEPS = 4
"""Steps below the limit between two episodes that count as one."""
NOISE_FACTOR = 2.5
"""Standard deviations of a single step; the smoothed series has about half of these."""
TO_DEVIATION = 1.4826
"""A median absolute deviation times this is the standard deviation of what is normally distributed."""


@dataclass(frozen=True)
class Episode:
    """Steps from index `first` to index `last`, both included, in which a series lies above its limit."""

    first: int
    last: int
    excess: float
    """Their median."""
    steadiness: float
    """The fraction of them that lie above the limit without smoothing."""

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def where(self) -> slice:
        return slice(self.first, self.last + 1)

    def covers(self, other: Episode) -> float:
        """Return the fraction of the shorter one's steps that both have."""
        common = min(self.last, other.last) - max(self.first, other.first) + 1
        return max(0, common) / min(self.steps, other.steps)


def smoothed(series: Figures, steps: int = SMOOTHED_STEPS) -> Figures:
    """Return the running median over so many steps (an odd number) along the first axis; the ends repeat."""
    half = steps // 2
    if len(series) < steps:
        return np.repeat(np.median(series, axis=0)[None], len(series), axis=0) if len(series) else series
    # The ends are repeated so that a change in the newest steps is not lost.
    padded = np.concatenate([np.repeat(series[:1], half, 0), series, np.repeat(series[-1:], half, 0)])
    # A partition finds the median without a full sort, and this runs over all ranks and steps.
    middle: Figures = np.partition(sliding_window_view(padded, steps, axis=0), half, axis=-1)[..., half]
    return middle


def deviation(series: Figures) -> Figures:
    """Return the standard deviation of single steps along the first axis, by the differences of neighbours."""
    if len(series) < 2:
        return np.zeros(series.shape[1:])
    spread: Figures = TO_DEVIATION * np.median(np.abs(np.diff(series, axis=0)), axis=0) / np.sqrt(2)
    return spread


def usual(series: Figures) -> Figures:
    """Return what a series is when nothing disturbs it: the lower quartile of the smoothed one, which half a run of
    disturbance leaves alone."""
    level: Figures = np.percentile(smoothed(series), 25, axis=0)
    return level


def find_episodes(
    series: Figures, limit: Figures, steps_s: Figures, confirming_s: float = CONFIRMING_S
) -> list[Episode]:
    """Return the confirmed episodes of a series (T,) above `limit` (T,); `steps_s` (T,) is how long each step took."""
    above = smoothed(series) > limit
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(np.int8)))
    joined: list[tuple[int, int]] = []
    for first, last in zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True):
        # A slow device is fast in some step by chance; one disturbance must not be reported as many.
        if joined and first - joined[-1][1] <= GAP_STEPS:
            joined[-1] = joined[-1][0], last
        else:
            joined.append((first, last))
    found = []
    for first, last in joined:
        inside = slice(first, last + 1)
        if last - first + 1 >= CONFIRMING_STEPS and steps_s[inside].sum() >= confirming_s:
            values = series[inside]
            found.append(Episode(first, last, float(np.median(values)), float(np.mean(values > limit[inside]))))
    return found
