"""Memory that grows from step to step until none is left, and memory that is short already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trainspec_cli.balance.decisions.speeds import spread
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.results.verdict import RunVerdict
from trainspec_cli.reporter.diagnosis.evidence import Connection, Figures, RunEvidence
from trainspec_cli.run.recovery.watch import EIGHTHS, grows_steadily, slope_per_step

SETTLING_STEPS = 10
"""The first steps allocate what later ones reuse."""
LEAST_READINGS = 2 * EIGHTHS
READINGS = 6 * EIGHTHS
"""A leak is looked for in so many of the newest readings."""
ALIKE = 0.5
"""Where each of `EIGHTHS` readings in a row has grown by such a part of what they usually grow by, they are enough: a
cache that fills grows ever less."""
LEAST_LEAKING = 4
"""Readings since a leak began by which its slope is known."""
LEAST_GROWTH, LEAST_GROWTH_BYTES = 0.05, 32 * 2**20
"""Memory that grows by less, as a fraction of what it was and in all, is no leak."""
SWAPPED_BYTES = 16 * 2**20


def find_memory(evidence: RunEvidence) -> list[RunVerdict]:
    return [*_leaks(evidence), *_pressure(evidence)]


def _leaks(evidence: RunEvidence) -> list[RunVerdict]:
    slopes: dict[int, tuple[int, float, float]] = {}
    held = evidence.counter("rss_bytes")
    grown = np.fmax.reduce(held, axis=0) - np.fmin.reduce(held, axis=0)
    for rank in np.flatnonzero(grown > LEAST_GROWTH_BYTES).tolist():
        if (leak := _leak_of(evidence, rank)) is not None:
            slopes[rank] = leak
    # Ranks of one node share its memory: it ends when all of their growth together has used it up.
    of_node = defaultdict[int, float](float)
    for rank, (_, slope, _) in slopes.items():
        of_node[evidence.nodes[rank]] += slope
    verdicts = []
    for rank, (since, slope, grown_bytes) in slopes.items():
        left = _last(evidence.counter("available_bytes")[:, rank])
        full = None if left is None else int(evidence.steps[-1] + left / of_node[evidence.nodes[rank]])
        end = "" if full is None else f", and {format_bytes(left or 0)} are left: none at about step {full:,}"
        verdicts.append(
            RunVerdict(
                cause="memory_leak",
                rank=rank,
                since_step=since,
                confidence=0.9,
                full_step=full,
                evidence=(
                    f"the memory of rank {rank} grows by {format_bytes(slope)} a step, by {format_bytes(grown_bytes)} "
                    f"so far{end}",
                ),
            )
        )
    return verdicts


def _leak_of(evidence: RunEvidence, rank: int) -> tuple[int, float, float] | None:
    """Return (first step, bytes a step, bytes so far) of a rank that leaks."""
    steps, held = _readings(evidence, evidence.counter("rss_bytes")[:, rank])
    # The longest window first: it tells a slow leak from noise; the short one finds a fast leak early.
    for count in sorted({min(READINGS, len(steps)), min(LEAST_READINGS, len(steps)), EIGHTHS}, reverse=True):
        if count > len(steps) or (count < LEAST_READINGS and not _grows_evenly(held[-count:])):
            continue
        recent_steps = steps[-count:].tolist()
        recent = held[-count:].tolist()
        slope = slope_per_step(recent_steps, recent)
        grown_bytes = recent[-1] - recent[0]
        if grown_bytes > max(LEAST_GROWTH * recent[0], LEAST_GROWTH_BYTES) and grows_steadily(recent) and slope > 0:
            base = float(held[0])
            begun = int(np.argmax(held > base + LEAST_GROWTH_BYTES / 4))
            leaking = slice(max(begun, len(held) - count), None)  # what was read before it began would flatten it
            if len(held[leaking]) >= LEAST_LEAKING:
                slope = slope_per_step(steps[leaking].tolist(), held[leaking].tolist())
            before = max(0, leaking.start - 1)
            if slope * (steps[-1] - steps[before]) > ALIKE * (held[-1] - held[before]):  # not one jump
                return int(steps[begun]), slope, float(held[-1] - base)
    return None


def _grows_evenly(held: Figures) -> bool:
    grown = np.diff(held)
    return len(held) >= EIGHTHS and bool((grown > ALIKE * np.median(grown)).all() and np.median(grown) > 0)


def _readings(evidence: RunEvidence, series: Figures) -> tuple[Figures, Figures]:
    """Return the steps at which a state was read since a rank's work was changed last, and the readings: other work
    takes other memory."""
    begun = max([int(evidence.steps[0]), *(step for step in evidence.changed_steps if step <= evidence.steps[-1])])
    known = np.isfinite(series) & (evidence.steps > begun + SETTLING_STEPS)
    return evidence.steps[known].astype(np.float64), series[known]


def _last(series: Figures) -> float | None:
    known = series[np.isfinite(series)]
    return float(known[-1]) if known.size else None


def _pressure(evidence: RunEvidence) -> list[RunVerdict]:
    """Return the ranks whose memory is swapped out, or whose GPU's allocator must give back what it holds."""
    verdicts = []
    is_short = np.fmax.reduce(evidence.counter("swap_bytes"), axis=0) > SWAPPED_BYTES
    is_short |= np.nan_to_num(evidence.counter("allocator_retries")).any(axis=0)
    for rank in np.flatnonzero(is_short).tolist():
        swapped = evidence.counter("swap_bytes")[:, rank]
        retries = np.nan_to_num(evidence.counter("allocator_retries")[:, rank])
        known = np.isfinite(swapped)
        if known.any() and np.nanmax(swapped) - swapped[known][0] > SWAPPED_BYTES:
            since = int(np.argmax(np.nan_to_num(swapped) > swapped[known][0] + SWAPPED_BYTES / 4))
            what = f"{format_bytes(float(np.nanmax(swapped)))} of rank {rank} are swapped out to disk"
        elif (retries > 0).sum() >= 3:
            since = int(np.argmax(retries > 0))
            what = f"the allocator of rank {rank} gave back what it held in {(retries > 0).sum()} steps"
        else:
            continue
        verdicts.append(
            RunVerdict(
                cause="memory_pressure",
                rank=rank,
                since_step=int(evidence.steps[since]),
                confidence=0.8,
                evidence=(what,),
            )
        )
    return verdicts


# How far the nodes' clocks are apart, measured by the exchange that ends each step.
#
# No rank leaves it before the last one has entered it, and all leave it within the time that it takes from then on:
# the differences of the times at which they left, each by its node's clock, are those of the clocks, but for that
# time.


@dataclass(frozen=True)
class ClockOffset:
    """A node's clock is ahead of the first node's by `offset_s`, known within `error_s`."""

    node: int
    offset_s: float
    error_s: float | None
    """None where no exchange shows it; the offset is 0 then."""
    exchanges: int
    """Exchanges that show it."""


@dataclass(frozen=True)
class Leaving:
    """A rank has left the exchange that ends a step."""

    at: float
    """Unix seconds by its node's clock."""
    took_s: float
    """The shortest such exchange of these steps, waiting included."""


def clock_offsets(nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> tuple[ClockOffset, ...]:
    """Return the offsets of all nodes; `left` holds for each rank when it left the exchanges of which steps."""
    first = min(nodes, default=0)
    return tuple(_offset(node, first, nodes, left) for node in sorted(set(nodes)))


def _offset(node: int, first: int, nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> ClockOffset:
    if node == first:
        return ClockOffset(node, 0.0, 0.0, 0)
    here, there = (_of_node(one, nodes, left) for one in (node, first))
    common = sorted(here.keys() & there.keys())
    if not common:
        return ClockOffset(node, 0.0, None, 0)
    middle, deviation = spread([here[step].at - there[step].at for step in common])
    transfer_s = median(min(here[step].took_s, there[step].took_s) for step in common)
    return ClockOffset(node, middle, transfer_s + 1.2533 * deviation / len(common) ** 0.5, len(common))


def _of_node(node: int, nodes: Sequence[int], left: Sequence[Mapping[int, Leaving]]) -> dict[int, Leaving]:
    """Return when the first rank of a node left each exchange: others may have waited for a processor."""
    ranks = [left[rank] for rank, home in enumerate(nodes) if home == node]
    steps = set().union(*ranks) if ranks else set()
    return {step: min((of[step] for of in ranks if step in of), key=lambda one: one.at) for step in steps}


# When a series is higher than it should be: smoothed against single outliers, held against its own noise, confirmed.
#
# The noise is taken from the differences of neighbouring steps, which a change of level leaves alone however much of
# the series lies behind it (a median absolute deviation from the series' median would count half of a long change as
# noise).


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


# What the connections between two ranks show in an episode, and by how much counters of all ranks rise in it.


OVERFLOW, QUEUED_S, QUEUED = 0.05, 2e-3, 4.0
"""A queue before a narrow link drops what it cannot hold: no larger part of the segments, while round trips take so
much longer and so many times as long as usual. A link that loses segments has no queue."""

Pair = tuple[int, int]


@dataclass(frozen=True)
class Path:
    """The connections between two ranks, both ways, in an episode."""

    ranks: Pair
    resent: float
    resent_later: float
    """Of them those of the episode's later half."""
    segments: float
    segments_later: float
    timeouts: float
    rate: float
    """Bytes a second while anything was under way; 0 where it is not known."""
    usual_rate: float
    """The same at other times."""
    rtt_s: float
    usual_rtt_s: float

    def has_queue(self, least_s: float = QUEUED_S) -> bool:
        """Return whether what is sent waits on its way: round trips take far longer than at other times, and `least_s`
        longer."""
        return self.rtt_s > max(self.usual_rtt_s + least_s, QUEUED * self.usual_rtt_s)

    @property
    def overflows(self) -> bool:
        """Whether what was sent again was dropped by a queue that is full: TCP fills it to find the link's rate, and
        fills it most while the link has just become narrow."""
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
    # A narrow link drops most while TCP still looks for its rate; a lossy one goes on losing.
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
    """Return by how much a counter of all ranks is above its usual level in an episode; 0 where it is not known."""
    whole = over_all_ranks(series, over_ranks)
    inside = whole[episode.where]
    if not np.isfinite(inside).any():
        return 0.0
    return float(np.nanmedian(inside) - np.nanpercentile(whole, 25))


def over_all_ranks(series: Figures, over_ranks: Callable[..., Figures]) -> Figures:
    """Return a counter (T,) over all ranks; NaN where a rank's is not known, 0 throughout where none is."""
    if not np.isfinite(series).any():
        return np.zeros(len(series))
    whole = np.full(len(series), np.nan)
    known = np.isfinite(series).any(axis=1)
    whole[known] = over_ranks(series[known], axis=1)
    return whole
