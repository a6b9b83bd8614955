"""Measure the speed of the links of each mesh axis from a run's own exchanges, and detect changes.

A link is a group of ranks that exchange along one axis or, in a pipeline, two neighbours. To take a sample, a step has
a barrier before every exchange, which separates the transfer from the wait for the last rank. As for a rank's speed
(`speeds.py`), a change is confirmed by more consecutive samples than chance would explain. Samples are fewer and
noisier than steps, so their logarithms are compared."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median, median_high
from typing import NamedTuple

from trainspec_cli.balance.decisions.speeds import NOISE_FACTOR, spread
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.verdict import MeasuredLink

FIRST_SAMPLES = 8
"""Number of samples that are needed to learn a link's speed, initially and after a change."""
CONFIRMING_SAMPLES = 3
"""Number of consecutive samples that confirm a change."""
REMEMBERED_SAMPLES = 50
RECENT_SAMPLES = 25
"""A drift that no single sample reveals is detected by comparing two medians: that of the recent samples, and that of
the first `REMEMBERED_SAMPLES` samples since the last change."""
DRIFT_FACTOR = 5.0
"""A difference of this many standard errors is treated as a drift. The standard error of a median is 1.2533 deviations
/ sqrt(n)."""
TIMED_EXCHANGES = 4
"""Maximum number of exchanges per axis that are timed in a sampled step. They are spread over the step."""
COST_SHARE = 1e-3
"""Fraction of the run's time that sampling may take."""
FIRST_SAMPLE_STEPS = 3
"""Number of steps after a start in which no sample is taken, because they include compilation, warm-up and connection
set-up."""
LEAST_INTERVAL_STEPS = 10
TOLD_STEPS = 2
"""Number of steps until all ranks know when the next sample is taken. A sample's results are sent with the next step,
and the decision with the step after that."""
REMEMBERED_STEPS = 20
DEPARTED_STEPS = 2
"""This many consecutive steps with an unusual duration trigger a sample."""
OTHER_SIZE = 0.25
"""If the size of an exchange changes by this fraction, the speed is learnt again, because it depends on the size."""
LARGE = 0.5
"""Exchanges smaller than this fraction of the largest one are ignored, because they measure latency rather than
bandwidth."""


@dataclass(frozen=True)
class Transfer:
    """The exchanges of one rank along an axis in a sampled step; 0 bytes if there were none."""

    sent_bytes: float = 0.0
    """Bytes that the rank sends in the largest exchange, assuming a ring algorithm."""
    seconds: float = 0.0
    """Time to transfer these bytes, starting when the last rank has arrived."""
    waited_s: float = 0.0
    """This rank's median wait for the last rank to arrive at an exchange."""


@dataclass(frozen=True)
class LinkSpeed:
    """The current speed of a link: the median over its samples since its last change."""

    ranks: tuple[int, ...]
    bytes_per_s: float
    """Rate at which each rank of the link sends."""
    noise: float
    """Standard deviation of the samples (median absolute deviation x 1.4826), as a fraction."""
    sent_bytes: float
    """Number of bytes that a rank sends in one exchange."""
    waited_s: float
    """Median time per exchange that the first rank to arrive waits for the last one."""
    last_rank: int
    """The rank that arrived last in most samples."""
    samples: int


@dataclass(frozen=True)
class LinkChange:
    """A confirmed change of a link's speed."""

    ranks: tuple[int, ...]
    since_step: int
    """Step of the first sample that shows the change."""
    before_bytes_per_s: float
    now_bytes_per_s: float
    links: int = 1
    """Number of links of the axis that changed in the same sample; this one changed the most."""

    @property
    def factor(self) -> float:
        """Return the ratio of the faster to the slower speed, at least 1."""
        ratio = self.now_bytes_per_s / self.before_bytes_per_s
        return max(ratio, 1 / ratio)


def transfer_of(exchanges: Sequence[tuple[float, float, float]]) -> Transfer:
    """Summarise a rank's timed exchanges, each with (bytes, seconds, waiting seconds). The median over the large
    exchanges is used, because the operating system may pause a rank during one of them."""
    largest_bytes = max((sent_bytes for sent_bytes, *_ in exchanges), default=0.0)
    if largest_bytes <= 0:
        return Transfer()
    pace = median(seconds / sent_bytes for sent_bytes, seconds, _ in exchanges if sent_bytes >= LARGE * largest_bytes)
    return Transfer(largest_bytes, pace * largest_bytes, median(waited_s for *_, waited_s in exchanges))


class LinkTracker:
    """Tracks the speed of one link from its samples."""

    def __init__(self, ranks: tuple[int, ...], change: float):
        """`change`: the smallest relative change that is confirmed."""
        self.ranks, self._least = ranks, math.log1p(change)
        self._waits: deque[tuple[float, int]] = deque(maxlen=REMEMBERED_SAMPLES)
        """(longest wait, last rank) of each sample."""
        self._forget(0.0)

    def _forget(self, sent_bytes: float) -> None:
        """Forget all samples, because the exchanges now have another size."""
        self._sent_bytes = sent_bytes
        self._departed: list[Sample] = []
        """The latest consecutive samples that are outside the noise, all on the same side."""
        self.confirmed: LinkSpeed | None = None
        """The speed that was learnt, or confirmed by a change, most recently."""
        self._begin([])

    def _begin(self, samples: Sequence[Sample]) -> None:
        """Continue from the speed measured in `samples`."""
        self._samples = deque(samples, maxlen=REMEMBERED_SAMPLES)
        """Samples since the last change."""
        self._settled: float | None = None
        """Median of the first `REMEMBERED_SAMPLES` samples, once that many exist."""

    def note(self, step: int, transfers: Sequence[Transfer]) -> LinkChange | None:
        """Record a sample with a transfer for each rank; return the change that it confirms, if any. The slowest rank's
        time counts, because a rank with a slow outgoing link has handed over its data long before the data arrives."""
        sent_bytes = max(transfer.sent_bytes for transfer in transfers)
        seconds = max(transfer.seconds for transfer in transfers)
        if sent_bytes <= 0 or seconds <= 0:
            return None
        if abs(sent_bytes - self._sent_bytes) > OTHER_SIZE * self._sent_bytes:
            self._forget(sent_bytes)
        waits_s = [transfer.waited_s for transfer in transfers]
        self._waits.append((max(waits_s), self.ranks[waits_s.index(min(waits_s))]))
        return self._compare(Sample(step, math.log(sent_bytes / seconds)))

    def _compare(self, sample: Sample) -> LinkChange | None:
        if len(self._samples) < FIRST_SAMPLES:
            self._samples.append(sample)
            if len(self._samples) == FIRST_SAMPLES:
                self.confirmed = self.speed
            return None
        usual, noise = _spread(self._samples)
        departs = sample.log_rate - usual
        if abs(departs) <= max(self._least, NOISE_FACTOR * noise):
            self._departed.clear()
            self._samples.append(sample)
            return self._drifted(noise)
        same_side = [one for one in self._departed if (one.log_rate > usual) == (departs > 0)]
        self._departed = [*same_side, sample]
        return self._changed(usual, self._departed) if len(self._departed) >= CONFIRMING_SAMPLES else None

    def _drifted(self, noise: float) -> LinkChange | None:
        """Return the drift that the recent samples show as a group."""
        if len(self._samples) < REMEMBERED_SAMPLES:
            return None
        if self._settled is None:
            self._settled, _ = _spread(self._samples)
        recent = list(self._samples)[-RECENT_SAMPLES:]
        now, _ = _spread(recent)
        chance = 1.2533 * noise * math.sqrt(1 / REMEMBERED_SAMPLES + 1 / RECENT_SAMPLES)
        if abs(now - self._settled) <= max(self._least, DRIFT_FACTOR * chance):
            return None
        return self._changed(self._settled, recent)

    def _changed(self, before: float, shown: Sequence[Sample]) -> LinkChange:
        now, _ = _spread(shown)
        self._begin(shown)
        self._departed = []
        self.confirmed = self.speed
        return LinkChange(self.ranks, shown[0].step, math.exp(before), math.exp(now))

    @property
    def is_undecided(self) -> bool:
        """Return whether the speed is still being learnt, or may have changed."""
        return bool(self._departed) or 0 < len(self._samples) < FIRST_SAMPLES

    @property
    def speed(self) -> LinkSpeed | None:
        """Return the link's speed; None before the first sample."""
        if not self._samples:
            return None
        usual, noise = _spread(self._samples)
        last = [rank for _, rank in self._waits]
        return LinkSpeed(
            ranks=self.ranks,
            bytes_per_s=math.exp(usual),
            noise=math.expm1(noise),
            sent_bytes=self._sent_bytes,
            waited_s=median(waited_s for waited_s, _ in self._waits),
            last_rank=max(dict.fromkeys(last), key=last.count),
            samples=len(self._samples),
        )


class Sample(NamedTuple):
    """A sample: a link's speed in one step."""

    step: int
    log_rate: float
    """Natural logarithm of the bytes per second."""


def _spread(samples: Collection[Sample]) -> tuple[float, float]:
    return spread([sample.log_rate for sample in samples])


class AxisLinks:
    """All links of an axis."""

    def __init__(self, axis: str, links: Sequence[tuple[int, ...]], change: float):
        """`links`: the ranks of each link."""
        self.axis = axis
        self._trackers = [LinkTracker(ranks, change) for ranks in links]

    def note(self, step: int, transfers: Sequence[Sequence[Transfer]]) -> LinkChange | None:
        """Record a sample with the transfers of each link's ranks. Return the largest change that it confirms, if
        any."""
        noted = [tracker.note(step, of_link) for tracker, of_link in zip(self._trackers, transfers, strict=True)]
        changes = [change for change in noted if change is not None]
        if not changes:
            return None
        most = max(changes, key=lambda change: change.factor)
        return LinkChange(
            most.ranks, most.since_step, most.before_bytes_per_s, most.now_bytes_per_s, links=len(changes)
        )

    def __len__(self) -> int:
        return len(self._trackers)

    @property
    def is_undecided(self) -> bool:
        """Return whether the speed of any link is still being learnt, or may have changed."""
        return any(tracker.is_undecided for tracker in self._trackers)

    @property
    def confirmed(self) -> list[LinkSpeed]:
        """Return the known speeds of the links. They remain valid until a change is confirmed."""
        return [tracker.confirmed for tracker in self._trackers if tracker.confirmed is not None]

    @property
    def slowest(self) -> LinkSpeed | None:
        """Return the slowest link; None before the first sample."""
        known = [speed for tracker in self._trackers if (speed := tracker.speed) is not None]
        return min(known, key=lambda speed: speed.bytes_per_s, default=None)


def sampling_interval(costs_s: Sequence[float], step_s: float) -> int:
    """Return the number of steps until the next sample. `costs_s`: additional time in seconds that each of the latest
    samples cost the slowest rank. `step_s`: duration of a step."""
    if not costs_s or step_s <= 0:
        return LEAST_INTERVAL_STEPS
    return max(LEAST_INTERVAL_STEPS, math.ceil(median(costs_s) / (COST_SHARE * step_s)))


class SampleTimes:
    """Schedules the samples: immediately after the step duration changes, in quick succession while the speed of a link
    is unsettled, and otherwise as rarely as their cost requires. The number of additional samples is limited to those
    needed to learn a link, plus one per regular sample. Noise that looks like a change therefore at most doubles the
    cost of sampling."""

    def __init__(self, change: float) -> None:
        """`change`: the smallest relative change in step duration that triggers a sample."""
        self._least = math.log1p(change)
        self._spare = FIRST_SAMPLES
        self._steps = deque[float](maxlen=REMEMBERED_STEPS)
        """Logarithms of the durations, in seconds, of steps that took the usual time."""
        self._departed = 0
        """Number of most recent consecutive steps with an unusual duration."""

    def note_step(self, step_s: float) -> bool:
        """Record a step without a sample. Return whether to sample the links because the step duration changed."""
        if step_s <= 0:
            return False
        taken = math.log(step_s)
        if len(self._steps) < FIRST_SAMPLES:
            self._steps.append(taken)
            return False
        usual, noise = spread(self._steps)
        if abs(taken - usual) <= max(self._least, NOISE_FACTOR * noise):
            self._steps.append(taken)
            self._departed = 0
            return False
        self._departed += 1
        if self._departed < DEPARTED_STEPS or self._spare == 0:
            return False
        self._spare -= 1
        self._departed = 0
        self._steps.clear()
        return True

    def steps_to_next(self, usual: int, least: int, *, is_undecided: bool) -> int:
        """Return the number of steps until the next sample: `usual`, which depends on the cost of a sample, but at
        least `least`."""
        if is_undecided and self._spare > 0:
            self._spare -= 1
            return max(1, least)
        self._spare = min(FIRST_SAMPLES, self._spare + 1)
        return max(usual, least)


# Track the ratio of each rank's exchange times to the usual exchange times, both inside and between scale-up domains.


@dataclass(frozen=True)
class LinkPaces:
    """Slowdown of each global rank's exchanges: the ratio of their times to the usual times, or 1 if usual or
    unknown."""

    scaleup: tuple[float, ...]
    """Slowdown of exchanges inside a scale-up domain."""
    network: tuple[float, ...]
    """Slowdown of exchanges between domains."""

    @property
    def is_usual(self) -> bool:
        return set(self.scaleup) | set(self.network) == {1.0}


class LinkPaceTracker:
    def __init__(self, change: float, domain_ranks: int):
        """`change`: a link that is slower than usual by at most this fraction is considered usual. `domain_ranks`:
        number of neighbouring ranks in a scale-up domain."""
        self._change = change
        self._domain_ranks = domain_ranks
        self._layout: Layout | None = None
        self._usual: dict[tuple[str, int], Usual] = {}
        """Usual speed of the links, by axis and pipeline stage."""
        self._paces: dict[tuple[bool, int], float] = {}
        """The paces (slowdowns), keyed by (whether the exchange crosses domains, rank)."""

    def note(self, layout: Layout, links: Sequence[MeasuredLink]) -> LinkPaces:
        """Record the speeds of links, and return the paces. Ranks that are on none of these links keep their paces."""
        if layout != self._layout:
            self._layout = layout
            self._usual = {}
        kinds: defaultdict[tuple[str, int], list[MeasuredLink]] = defaultdict(list)
        for link in links:
            kinds[link.axis, link.ranks[0] * layout.pp // layout.world_size].append(link)
        shown: defaultdict[tuple[bool, int], list[tuple[float, float]]] = defaultdict(list)
        for kind, alike in kinds.items():
            usual = self._usual_of(kind, alike)
            for link in filter(usual.is_comparable, alike):
                for rank in link.ranks:
                    shown[self._is_between(link), rank].append((link.sent_bytes, self._pace(link, usual)))
        for place, of_rank in shown.items():
            # The smallest of a rank's paces is its own, because other ranks may slow its other exchanges.
            largest_bytes = max(sent_bytes for sent_bytes, _ in of_rank)
            self._paces[place] = min(pace for sent_bytes, pace in of_rank if sent_bytes >= LARGE * largest_bytes)
        scaleup, network = (
            tuple(self._paces.get((between, rank), 1.0) for rank in range(layout.world_size))
            for between in (False, True)
        )
        return LinkPaces(scaleup, network)

    def _usual_of(self, kind: tuple[str, int], links: Sequence[MeasuredLink]) -> Usual:
        """Return the usual speed of this kind of link. It is learnt from the first sample, and again when the exchange
        size changes."""
        usual = self._usual.get(kind)
        middle = sorted(links, key=lambda link: link.sent_bytes)[len(links) // 2]
        if usual is None or not usual.is_comparable(middle):
            alike = filter(Usual(0.0, middle.sent_bytes).is_comparable, links)
            # For a link already known to be slow, assume its usual speed.
            known = (
                (link, max(self._paces.get((self._is_between(link), rank), 1.0) for rank in link.ranks))
                for link in alike
            )
            rate = median_high(link.bytes_per_s * pace for link, pace in known)
            usual = self._usual[kind] = Usual(rate, middle.sent_bytes)
        return usual

    def _pace(self, link: MeasuredLink, usual: Usual) -> float:
        pace = usual.bytes_per_s / link.bytes_per_s
        return pace if pace - 1 > max(self._change, NOISE_FACTOR * link.noise) else 1.0

    def _is_between(self, link: MeasuredLink) -> bool:
        return len({rank // self._domain_ranks for rank in link.ranks}) > 1


@dataclass(frozen=True)
class Usual:
    bytes_per_s: float
    sent_bytes: float

    def is_comparable(self, link: MeasuredLink) -> bool:
        """Return whether a link's exchanges are of similar size, because smaller ones are slower per byte."""
        return abs(link.sent_bytes - self.sent_bytes) <= OTHER_SIZE * self.sent_bytes
