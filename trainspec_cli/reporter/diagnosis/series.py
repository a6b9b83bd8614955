"""Find episodes where a time series is too high, and what counters and connections show during these episodes.

A series is smoothed to remove single outliers. It is too high if it exceeds its noise for long enough. The noise is
estimated from the differences between neighbouring steps, which a change of level does not affect. By contrast, the
median absolute deviation from the series' median would treat half of a long change as noise."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainspec_cli.recipe.results.verdict import Cause, RunVerdict
from trainspec_cli.reporter.diagnosis.evidence import Connection, Figures, RunEvidence

LEAST_SHARE = 0.1
"""Causes that cost less than this fraction of a step are not reported."""
MOST_RANKS = 0.5
"""A cause that affects more than this fraction of the ranks is reported for the entire run."""
STEADY = 0.6
"""If other load could be the cause, at least this fraction of an episode's steps must be slow."""
SMOOTHED_STEPS = 5
CONFIRMING_STEPS = 3
"""A series must be above its limit for at least this many steps in a row."""
CONFIRMING_S = 1.0
"""It must also be above its limit for at least this many seconds, because shorter bursts of load on the machine do not
matter."""
GAP_STEPS = 4
"""Two episodes with at most this many steps between them are merged."""
NOISE_FACTOR = 2.5
"""Distance of the limit from the usual level, in standard deviations of a single step. (The standard deviation of the
smoothed series is about half as large.)"""
TO_DEVIATION = 1.4826
"""Ratio of the standard deviation of a normal distribution to its median absolute deviation."""


@dataclass(frozen=True)
class Episode:
    """Steps from index `first` to index `last`, inclusive, where a series is above its limit."""

    first: int
    last: int
    excess: float
    """The median excess over the usual level in these steps, in seconds."""
    steadiness: float
    """Fraction of the steps in which the unsmoothed series is above the limit."""

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def where(self) -> slice:
        return slice(self.first, self.last + 1)

    def covers(self, other: Episode) -> float:
        """Return the overlap of two episodes, as a fraction of the shorter one's steps."""
        common = min(self.last, other.last) - max(self.first, other.first) + 1
        return max(0, common) / min(self.steps, other.steps)


def smoothed(series: Figures) -> Figures:
    """Return the running median over `SMOOTHED_STEPS` steps along the first axis; the values at the ends are
    repeated."""
    half = SMOOTHED_STEPS // 2
    if len(series) < SMOOTHED_STEPS:
        return np.repeat(np.median(series, axis=0)[None], len(series), axis=0) if len(series) else series
    # Repeat the ends so that a change in the newest steps is not lost.
    padded = np.concatenate([np.repeat(series[:1], half, 0), series, np.repeat(series[-1:], half, 0)])
    # This processes all ranks and steps, so it uses `np.partition`, which finds the median without a full sort.
    middle: Figures = np.partition(sliding_window_view(padded, SMOOTHED_STEPS, axis=0), half, axis=-1)[..., half]
    return middle


def deviation(series: Figures) -> Figures:
    """Return the standard deviation of single steps along the first axis, from the differences between neighbours."""
    if len(series) < 2:
        return np.zeros(series.shape[1:])
    spread: Figures = TO_DEVIATION * np.median(np.abs(np.diff(series, axis=0)), axis=0) / np.sqrt(2)
    return spread


def usual(series: Figures) -> Figures:
    """Return the undisturbed level of a series: the lower quartile of the smoothed series. It is unaffected even if
    half of the run is disturbed."""
    level: Figures = np.percentile(smoothed(series), 25, axis=0)
    return level


def find_episodes(
    series: Figures, limit: Figures, steps_s: Figures, confirming_s: float = CONFIRMING_S
) -> list[Episode]:
    """Return the confirmed episodes where a series (T,) is above `limit` (T,). `steps_s` (T,) is the duration of
    each step."""
    above = smoothed(series) > limit
    edges = np.flatnonzero(np.diff(np.concatenate([[False], above, [False]]).astype(np.int8)))
    joined: list[tuple[int, int]] = []
    for first, last in zip(edges[::2].tolist(), (edges[1::2] - 1).tolist(), strict=True):
        # A slow device is fast in some steps by chance. Merge episodes, so that one disturbance is not reported as
        # several.
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


def until(evidence: RunEvidence, episode: Episode) -> int | None:
    """Return the last step of an episode; None if it may continue."""
    # Smoothing repeats the last values, so the end of an episode is not visible in the newest steps yet.
    return None if episode.last >= len(evidence.steps) - 2 else int(evidence.steps[episode.last])


def confidence(episode: Episode) -> float:
    """Return the confidence in an episode, which grows with the number and the fraction of the steps that show it."""
    return round(min(0.99, episode.steadiness * (1 - 0.5 / episode.steps)), 2)


def verdict_of(
    evidence: RunEvidence,
    episode: Episode,
    cause: Cause,
    *sentences: str,
    rank: int | None = None,
    node: int | None = None,
    link: tuple[int, ...] | None = None,
) -> RunVerdict:
    """Return a verdict on an episode, which determines the verdict's start, cost and confidence."""
    return RunVerdict(
        cause=cause,
        rank=rank,
        node=node,
        link=link,
        since_step=int(evidence.steps[episode.first]),
        until_step=until(evidence, episode),
        cost_s=episode.excess,
        confidence=confidence(episode),
        evidence=sentences,
    )


def mean_known(values: Figures) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else float("nan")


def means_known(values: Figures) -> Figures:
    """Return the mean of the known values over the first axis; NaN if none are known."""
    known = np.isfinite(values)
    counts = known.sum(axis=0)
    with np.errstate(invalid="ignore"):
        means: Figures = np.where(known, values, 0.0).sum(axis=0) / np.where(counts, counts, np.nan)
    return means if np.isfinite(means).any() else np.array([np.nan])


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


# Evaluate the connections between two ranks during an episode, and the rise of counters over all ranks.


OVERFLOW, QUEUED_S, QUEUED = 0.05, 2e-3, 4.0
"""On a narrow link, the full queue drops at most this fraction of the segments, and round trips take at least this many
seconds longer and at least this many times as long. A lossy link has no queue."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Path:
    """The connections between two ranks, in both directions, during an episode."""

    ranks: Pair
    resent: float
    resent_later: float
    """Number of segments retransmitted in the second half of the episode."""
    segments: float
    segments_later: float
    timeouts: float
    rate: float
    """Bytes per second while data was in flight; 0 if unknown."""
    usual_rate: float
    """The same rate outside the episode."""
    rtt_s: float
    usual_rtt_s: float

    def has_queue(self, least_s: float = QUEUED_S) -> bool:
        """Return whether data waits in a queue, so that round trips take much longer than at other times, by at least
        `least_s`."""
        return self.rtt_s > max(self.usual_rtt_s + least_s, QUEUED * self.usual_rtt_s)

    @property
    def overflows(self) -> bool:
        """Return whether a full queue dropped the segments that were retransmitted. TCP fills the queue while it
        searches for the link's rate, especially just after the link has become narrow."""
        of_later = self.resent_later <= OVERFLOW * self.segments_later
        return self.has_queue() and (of_later or self.resent <= OVERFLOW * self.segments)


def paths_of(connections: Sequence[Connection], episode: Episode) -> list[Path]:
    of_pair: dict[Pair, list[Connection]] = defaultdict(list)
    for connection in connections:
        first, second = sorted(connection.ranks)
        of_pair[first, second].append(connection)
    return [_path(ranks, of_pair[ranks], episode) for ranks in sorted(of_pair)]


def _path(ranks: Pair, connections: Sequence[Connection], episode: Episode) -> Path:
    inside = np.zeros(len(connections[0].sent_bytes), dtype=bool)
    inside[episode.where] = True
    later = inside.copy()
    # A narrow link drops most segments while TCP searches for its rate; a lossy link keeps losing them.
    later[: episode.first + episode.steps // 2] = False

    def total(name: str, where: Figures | np.ndarray = inside) -> float:
        return float(sum(np.nansum(getattr(one, name)[where]) for one in connections))

    def median_rtt_s(where: np.ndarray) -> float:
        seen = np.concatenate([one.rtt_s[where] for one in connections])
        return float(np.nanmedian(seen)) if np.isfinite(seen).any() else 0.0

    def rate(where: np.ndarray) -> float:
        busy_s = total("busy_s", where)
        return total("sent_bytes", where) / busy_s if busy_s > 0 else 0.0

    return Path(
        ranks,
        total("resent"),
        total("resent", later),
        max(1.0, total("segments")),
        max(1.0, total("segments", later)),
        total("timeouts"),
        rate(inside),
        rate(~inside),
        median_rtt_s(inside),
        median_rtt_s(~inside),
    )


def rise(series: Figures, episode: Episode, over_ranks: Callable[..., Figures]) -> float:
    """Return by how much a counter, over all ranks, exceeds its usual level during an episode; 0 if unknown."""
    whole = over_all_ranks(series, over_ranks)
    inside = whole[episode.where]
    if not np.isfinite(inside).any():
        return 0.0
    return float(np.nanmedian(inside) - np.nanpercentile(whole, 25))


def over_all_ranks(series: Figures, over_ranks: Callable[..., Figures]) -> Figures:
    """Return a counter (T,) summed over all ranks: NaN where a rank's value is unknown, 0 everywhere if no rank's value
    is known."""
    if not np.isfinite(series).any():
        return np.zeros(len(series))
    whole = np.full(len(series), np.nan)
    known = np.isfinite(series).any(axis=1)
    whole[known] = over_ranks(series[known], axis=1)
    return whole
