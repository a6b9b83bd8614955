"""How fast the links of each mesh axis are, as a run's own exchanges show it, and when that has changed.

A link is a group of ranks that exchange along one axis; of a pipeline, two neighbours. A sample is one step in which
the ranks of every exchange met before it, so that what it takes from there on is the transfer, and what came before is
waiting for the last rank. A change is confirmed as that of a rank's speed is (`speeds.py`), by more samples in a row
than chance explains. Samples are fewer than steps, and noisier: they are compared by their logarithms.
"""

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
"""A link's speed is learnt from so many samples, at first and after a change."""
CONFIRMING_SAMPLES = 3
"""The number of samples in a row that confirm a change."""
REMEMBERED_SAMPLES, RECENT_SAMPLES = 50, 25
"""The median of the recent ones shows a change that no single one does, against that of so many since the last one."""
DRIFT_FACTOR = 5.0
"""It does at so many standard deviations of the difference; a median is off by 1.2533 deviations over the root."""
TIMED_EXCHANGES = 4
"""The most exchanges of an axis that are timed in a sampled step, spread over it."""
COST_SHARE = 1e-3
"""Sampling may take this share of the run's time."""
FIRST_SAMPLE_STEPS = 3
"""The first steps of a start compile, warm up and connect."""
LEAST_INTERVAL_STEPS = 10
TOLD_STEPS = 2
"""The figures of a sample travel with the next step, and when the next one is taken with the step after that."""
REMEMBERED_STEPS, DEPARTED_STEPS = 20, 2
"""So many steps in a row that take another time than the last ones did ask for a sample."""
OTHER_SIZE = 0.25
"""Exchanges whose bytes differ by this fraction take another time by their size alone: what was learnt is forgotten."""
LARGE = 0.5
"""Exchanges of less than this part of the largest one's bytes show the latency more than the bandwidth."""


@dataclass(frozen=True)
class Transfer:
    """The exchanges of one rank along an axis in a sampled step; without bytes where it had none."""

    sent_bytes: float = 0.0
    """Bytes that the rank sends in the largest of them, as a ring does."""
    seconds: float = 0.0
    """Time of so many bytes from when the last rank had come."""
    waited_s: float = 0.0
    """This rank's wait for the last one, in each exchange; the last one waits least."""


@dataclass(frozen=True)
class LinkSpeed:
    """A link as it is now: the median over its samples since its last change."""

    ranks: tuple[int, ...]
    bytes_per_s: float
    """Rate at which each of its ranks sends."""
    noise: float
    """The samples' standard deviation (median absolute deviation x 1.4826), as a fraction."""
    sent_bytes: float
    """Bytes that a rank sends in one exchange."""
    waited_s: float
    """The rank that comes first waits so long in each exchange for the one that comes last."""
    last_rank: int
    """The rank that came last in most samples."""
    samples: int


@dataclass(frozen=True)
class LinkChange:
    """A link is faster or slower than it was."""

    ranks: tuple[int, ...]
    since_step: int
    """The first sample that shows it was taken then."""
    before_bytes_per_s: float
    now_bytes_per_s: float
    links: int = 1
    """The number of links of the axis that changed in the same sample; this one changed most."""

    @property
    def factor(self) -> float:
        """Return how many times faster or slower it is, whichever is above 1."""
        ratio = self.now_bytes_per_s / self.before_bytes_per_s
        return max(ratio, 1 / ratio)


def transfer_of(exchanges: Sequence[tuple[float, float, float]]) -> Transfer:
    """Return what a rank's timed exchanges (bytes, seconds, seconds of waiting) come to: of the large ones the median
    pace, since a rank that the operating system has paused makes one of them long."""
    largest_bytes = max((sent_bytes for sent_bytes, *_ in exchanges), default=0.0)
    if largest_bytes <= 0:
        return Transfer()
    pace = median(seconds / sent_bytes for sent_bytes, seconds, _ in exchanges if sent_bytes >= LARGE * largest_bytes)
    return Transfer(largest_bytes, pace * largest_bytes, median(waited_s for *_, waited_s in exchanges))


class LinkTracker:
    """One link, learnt from its samples."""

    def __init__(self, ranks: tuple[int, ...], change: float):
        """`change`: the smallest relative change that is confirmed."""
        self.ranks, self._least = ranks, math.log1p(change)
        self._waits: deque[tuple[float, int]] = deque(maxlen=REMEMBERED_SAMPLES)
        """(longest wait, the rank that came last)"""
        self._forget(0.0)

    def _forget(self, sent_bytes: float) -> None:
        """Begin with exchanges of another size."""
        self._sent_bytes = sent_bytes
        self._departed: list[Sample] = []
        """The last samples in a row that lie beyond the noise on one side."""
        self.confirmed: LinkSpeed | None = None
        """The speed as it was when it had been learnt, at first and after a change, or had changed."""
        self._begin([])

    def _begin(self, samples: Sequence[Sample]) -> None:
        """Begin with the speed that `samples` show."""
        self._samples = deque(samples, maxlen=REMEMBERED_SAMPLES)
        """The samples that showed no change."""
        self._settled: float | None = None
        """The median of the first ones, once they are as many as are remembered."""

    def note(self, step: int, transfers: Sequence[Transfer]) -> LinkChange | None:
        """Take in a sample, a transfer for each of the ranks; return the change that it confirms.

        The exchange is done when its slowest rank is: one whose line out is slow has handed its data over long before
        they arrive.
        """
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
        """Return the change that the recent samples show together."""
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
        """Return whether its speed is being learnt, or may have changed."""
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
    """A link's speed in one step."""

    step: int
    log_rate: float
    """The natural logarithm of its bytes a second."""


def _spread(samples: Collection[Sample]) -> tuple[float, float]:
    return spread([sample.log_rate for sample in samples])


class AxisLinks:
    """All links of an axis."""

    def __init__(self, axis: str, links: Sequence[tuple[int, ...]], change: float):
        """`links`: the ranks of each."""
        self.axis = axis
        self._trackers = [LinkTracker(ranks, change) for ranks in links]

    def note(self, step: int, transfers: Sequence[Sequence[Transfer]]) -> LinkChange | None:
        """Take in a sample, of each link the transfers of its ranks; return the greatest change that it confirms."""
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
        """Return whether the speed of some link is being learnt, or may have changed."""
        return any(tracker.is_undecided for tracker in self._trackers)

    @property
    def confirmed(self) -> list[LinkSpeed]:
        """Return the links' speeds that hold until a change is confirmed; none of those that are not known yet."""
        return [tracker.confirmed for tracker in self._trackers if tracker.confirmed is not None]

    @property
    def slowest(self) -> LinkSpeed | None:
        """Return the slowest link; None before the first sample."""
        known = [speed for tracker in self._trackers if (speed := tracker.speed) is not None]
        return min(known, key=lambda speed: speed.bytes_per_s, default=None)


def sampling_interval(costs_s: Sequence[float], step_s: float) -> int:
    """Return after how many steps the next sample is taken, where the last ones cost the slowest rank so many seconds
    each beside a step of `step_s`."""
    if not costs_s or step_s <= 0:
        return LEAST_INTERVAL_STEPS
    return max(LEAST_INTERVAL_STEPS, math.ceil(median(costs_s) / (COST_SHARE * step_s)))


class SampleTimes:
    """When samples are taken: at once when steps take another time than before, one soon after the other while links
    are undecided, else as seldom as their cost asks.

    The former are as many as it takes to learn a link, and one more for each of the latter: noise that makes links seem
    to change costs no more than twice what samples may.
    """

    def __init__(self, change: float) -> None:
        """`change`: the smallest relative change of a step's time that asks for a sample."""
        self._least = math.log1p(change)
        self._spare = FIRST_SAMPLES
        self._steps = deque[float](maxlen=REMEMBERED_STEPS)
        """The logarithms of the seconds of steps that took as long as usual."""
        self._departed = 0
        """The last steps in a row that did not."""

    def note_step(self, step_s: float) -> bool:
        """Take in a step without a sample; return whether the links are to be sampled, for steps take another time."""
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
        """Return the steps until the next sample: `usual` for its cost, and `least` at any rate."""
        if is_undecided and self._spare > 0:
            self._spare -= 1
            return max(1, least)
        self._spare = min(FIRST_SAMPLES, self._spare + 1)
        return max(usual, least)


# How many times as long as usual exchanges take over each rank's links, inside scale-up domains and between them.
#
# A narrow link is taken to be a rank's own way to the others, which its exchanges along all axes share: an exchange
# is as slow as the narrowest of its ranks' ways, and a rank is not narrow that also takes part in one as fast as
# usual. What is usual is learnt as for computing (`paces.py`): once for each layout, from the links of an axis in one
# pipeline stage together, with what was known of the ranks before.


@dataclass(frozen=True)
class LinkPaces:
    """How many times as long as usual exchanges take in which each global rank takes part; 1 for what is usual, and
    what is not known."""

    scaleup: tuple[float, ...]
    """Paces of exchanges inside a scale-up domain."""
    network: tuple[float, ...]
    """Paces of exchanges between domains."""

    @property
    def is_usual(self) -> bool:
        return set(self.scaleup) | set(self.network) == {1.0}


class LinkPaceTracker:
    def __init__(self, change: float, domain_ranks: int):
        """`change`: a link that is slower than usual by no more than this fraction is as fast as usual.
        `domain_ranks`: so many neighbouring ranks share a scale-up domain."""
        self._change = change
        self._domain_ranks = domain_ranks
        self._layout: Layout | None = None
        self._usual: dict[tuple[str, int], Usual] = {}
        """The usual speed of the links of an axis in a pipeline stage."""
        self._paces: dict[tuple[bool, int], float] = {}
        """Paces by whether an exchange is between domains, and by rank."""

    def note(self, layout: Layout, links: Sequence[MeasuredLink]) -> LinkPaces:
        """Take in how fast links are; ranks none of whose links are among them have those that they had."""
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
            # A rank's own pace is the least, since in its other exchanges another rank may be the narrow one. Small
            # exchanges show the latency more than the bandwidth.
            largest_bytes = max(sent_bytes for sent_bytes, _ in of_rank)
            self._paces[place] = min(pace for sent_bytes, pace in of_rank if sent_bytes >= LARGE * largest_bytes)
        scaleup, network = (
            tuple(self._paces.get((between, rank), 1.0) for rank in range(layout.world_size))
            for between in (False, True)
        )
        return LinkPaces(scaleup, network)

    def _usual_of(self, kind: tuple[str, int], links: Sequence[MeasuredLink]) -> Usual:
        """Return how fast links of a kind usually are, learnt when they are seen for the first time, or with exchanges
        of another size."""
        usual = self._usual.get(kind)
        middle = sorted(links, key=lambda link: link.sent_bytes)[len(links) // 2]
        if usual is None or not usual.is_comparable(middle):
            alike = filter(Usual(0.0, middle.sent_bytes).is_comparable, links)
            # A link known to be narrow counts at the speed that it would have if it were not.
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
        """Return whether a link's exchanges are as large: smaller ones, of ranks with fewer samples, are slower."""
        return abs(link.sent_bytes - self.sent_bytes) <= OTHER_SIZE * self.sent_bytes
