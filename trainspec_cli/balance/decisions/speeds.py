"""How fast a rank computes: its time for a micro-batch by the samples in it, and when that has changed. Also how much
slower than usual each rank of a layout is, and which size of gradient buckets is waited for least.

A rank's own compute time shows its speed; a whole step's does not, since all ranks wait for the slowest. A change is
confirmed when several steps in a row lie beyond what the rank's own noise explains, fewer where they lie far beyond it;
Greyhound (arXiv:2410.12588) confirms changes of 10% and more, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import NamedTuple

from trainspec_cli.recipe.keys.layout import Layout

FIRST_STEPS = 8
"""A rank's first speed is learnt from so many steps, and from more where they differ."""
SKIPPED_STEPS = 2
"""The first steps after a start, or with other shares, compile and warm up: they say nothing."""
CONFIRMING_STEPS = 3
"""The number of steps in a row that confirm a change."""
PLAIN, PLAIN_STEPS, PLAIN_S = 2.0, 2, 30.0
"""A change is plain that is so many times what could be noise: so many steps in a row confirm it, once they have taken
so many seconds. What runs beside the training (a checkpoint that is written, say) is over in less."""
SETTLING_S = 1.0
"""Other work of a machine that takes less time than this, in short steps, is no change of a rank's speed."""
REFINING_STEPS = 10
"""After a change, of the speed or of the shares, so many steps that show none set the speed to their median: the few
that confirmed it are noisy."""
REMEMBERED_STEPS = 50
STEEP = 1.35
"""A change by more than this factor shows in `CONFIRMING_STEPS` steps, also while a speed is being learnt. Where steps
differ by 5%, every change by 1.5 and more does, and no noise."""
EARLY_NOISE = 1 - 1 / STEEP
"""The noise of a speed that is not settled: ranks count as equally fast up to the factor `STEEP`."""
TELLING = 0.25
"""Sizes of micro-batches that are closer than this fraction do not tell what is fixed from what grows with them: the
steps' noise would be taken for it."""
OFF_THE_LINE = 0.15
"""Micro-batches whose size is other by this fraction may take another time than the line that was assumed says."""
NOISE_FACTOR = 4.0
"""A step is beyond the noise at so many standard deviations (median absolute deviation x 1.4826)."""


@dataclass(frozen=True)
class Speed:
    """Seconds of a micro-batch's forward and backward: `fixed_s` and `per_sample_s` for each sample in it."""

    fixed_s: float
    per_sample_s: float
    noise: float = field(default=0.0, compare=False)
    """The fraction by which the speed may be off: the steps that it was learnt from differ."""

    def time_s(self, samples: float, micro_batches: int) -> float:
        """Return the seconds that `samples` in so many micro-batches take."""
        return micro_batches * self.fixed_s + samples * self.per_sample_s

    shown_steps: int = field(default=0, compare=False)
    """Number of steps that confirmed it as a change; these already lost what the change costs."""
    is_settled: bool = field(default=True, compare=False)
    """Whether enough steps were seen for small differences to count."""

    def scaled(self, factor: float) -> Speed:
        return replace(self, fixed_s=self.fixed_s * factor, per_sample_s=self.per_sample_s * factor)


def computing_s(parts_s: Mapping[str, float], garbage_s: float) -> float:
    """Return the part of a rank's step that shows its speed, of which it collected garbage for `garbage_s`.

    Waiting for data, checkpoints and garbage say nothing of how fast it computes, and stay where it has fewer samples.
    """
    return max(0.0, parts_s["forward"] + parts_s["backward"] - garbage_s)


class _Seen(NamedTuple):
    """A rank's speed as one step shows it."""

    pace: float
    """Its computing time, over the time that its speed lets expect."""
    passed_s: float
    """The step's own time."""


class SpeedTracker:
    """One rank's speed, learnt from its own steps."""

    def __init__(self, change: float, settling_s: float = 0.0):
        """`change`: the smallest relative change that is confirmed. `settling_s`: steps that show a speed, or a change
        of it, take so many seconds at least."""
        self._change = change
        self._settling_s = settling_s
        self._speed: Speed | None = None
        self._learnt = StepShape(0, 1)
        """The shape of the steps that the speed was learnt from."""
        self._learning = list[_Seen]()
        """Steps that the next speed is learnt from; a pace is in seconds here."""
        self._early: Speed | None = None
        """The speed that these steps show, where it is not settled."""
        self._paces: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """Measured time over expected time, of steps that showed no change."""
        self._departed = list[_Seen]()
        """The last steps in a row that did."""
        self._unrefined: list[float] | None = None
        """The same of the steps since a change; None where the speed is refined."""
        self._refined_at = StepShape(0, 1)
        self._shape, self._steps = StepShape(0, 1), 0
        """The shape of the last steps, and how many in a row had it."""
        self._skipped: _Seen | None = None
        """The last of the first steps of a shape, which shows a steep change where the steps after it show it too."""

    @property
    def speed(self) -> Speed | None:
        """Return the confirmed speed; None until enough steps were seen."""
        return self._speed

    @property
    def estimate(self) -> Speed | None:
        """Return the confirmed speed; where it is being learnt, what the first steps show: steep changes alone."""
        return self._early or self._speed

    def note(self, samples: int, micro_batches: int, compute_s: float, waited_s: float = 0.0) -> None:
        """Take in a step of so many samples, of which this rank's own computing took `compute_s`. `waited_s`: beside
        that it waited for the others, which shows nothing of its speed, but that time goes by."""
        shape = StepShape(samples, micro_batches)
        if shape != self._shape:
            self._begin(shape)
        self._steps += 1
        if self._steps < SKIPPED_STEPS or not samples or compute_s <= 0:
            return
        seen = _Seen(compute_s, compute_s + waited_s)
        if self._steps == SKIPPED_STEPS:
            self._skipped = seen
        elif self._speed is None or self._learnt.differs(shape):
            self._learn(seen)
        else:
            self._compare(seen, self._speed.time_s(*shape), self._speed)

    def _begin(self, shape: StepShape) -> None:
        """Begin steps of another shape. Micro-batches that are as large as before need no warming up."""
        if shape.samples and shape.apart(self._refined_at) >= OFF_THE_LINE:
            self._unrefined = []
        warms_up = not shape.sizes <= self._shape.sizes
        if warms_up:
            self._steps = 0
        if warms_up or self._learning:
            self._departed.clear()
        self._learning.clear()
        self._skipped = None
        if self._early is not None and self._speed is not None:
            self._speed = self._early
            self._learnt = self._shape
            self._early = None
            self._unrefined = []
        self._shape = shape

    def _learn(self, seen: _Seen) -> None:
        """Learn until the median is known well enough not to be taken for a change. A steep change meanwhile restarts
        the learning: the steps before and after it have no common median, and their spread would count as noise."""
        known = self._learning[: len(self._learning) - len(self._departed)]
        self._learning.append(seen)
        middle_s = median(one.pace for one in known) if known else seen.pace
        own_noise = max(self._limit(self._paces), self._limit([one.pace / middle_s for one in known]))
        pace = seen.pace / middle_s
        noise = max(STEEP - 1, own_noise)
        if 1 / (1 + noise) <= pace <= 1 + noise:
            self._departed.clear()
        elif self._confirms(seen._replace(pace=pace), noise):
            del self._learning[: len(self._learning) - len(self._departed)]
            self._departed.clear()
            self._skipped = None
        shown = [self._skipped, *self._learning] if self._skipped and len(self._learning) < CONFIRMING_STEPS else ()
        self._look_early(shown or self._learning)
        measured_s = median(one.pace for one in self._learning)
        paces = [one.pace / measured_s for one in self._learning]
        if sum(one.passed_s for one in self._learning) < self._settling_s or not self._tell(paces):
            return
        departed = self._learning[len(self._learning) - len(self._departed) :]
        self._departed = [one._replace(pace=one.pace / measured_s) for one in departed]
        found = self._shown_by(measured_s)
        self._learnt = self._refined_at = self._shape
        self._unrefined = None if len(paces) >= FIRST_STEPS else []
        self._learning.clear()
        self._early = self._skipped = None
        self._paces.extend(paces)
        self._believe(found, len(paces))

    def _look_early(self, shown: Sequence[_Seen]) -> None:
        """Publish what the first steps show, unless the known speed explains it. The lower quartile of their times: all
        of them must be slow, so that single disturbed steps do not count."""
        if len(shown) < CONFIRMING_STEPS or sum(one.passed_s for one in shown) < self._settling_s:
            return
        measured_s = sorted(one.pace for one in shown)[(len(shown) - 1) // 4]
        pace = STEEP * 2 if self._speed is None else measured_s / self._speed.time_s(*self._shape)
        if not 1 / STEEP <= pace <= STEEP:
            found = self._shown_by(measured_s)
            self._early = replace(found, noise=EARLY_NOISE, shown_steps=len(shown), is_settled=False)

    def _shown_by(self, measured_s: float) -> Speed:
        """Return the speed that a step's time shows."""
        if self._speed is None:
            return Speed(0.0, measured_s / self._shape.samples)
        return through(self._learnt, self._speed, self._shape, measured_s)

    def _believe(self, speed: Speed, steps: int, shown_steps: int = 0) -> None:
        """Take over a speed that is the median of so many steps; a median is off by 1.25 deviations over their root."""
        noise = 1.25 * self._limit(self._paces) / math.sqrt(steps)
        # Number of steps, not noise alone: on a rank whose steps always differ widely, the noise never falls below
        # EARLY_NOISE, and no decision that needs settled speeds of all ranks would ever be made.
        is_settled = noise < EARLY_NOISE or steps >= FIRST_STEPS
        self._speed = replace(speed, noise=noise, shown_steps=shown_steps, is_settled=is_settled)

    def _tell(self, paces: Sequence[float]) -> bool:
        """Return whether steps of these paces are enough to learn a speed from; where the rank's noise is known, few
        are."""
        steps = len(paces)
        least = CONFIRMING_STEPS if len(self._paces) >= FIRST_STEPS else FIRST_STEPS
        noise = max(self._limit(self._paces), self._limit(paces)) / math.sqrt(steps)
        return steps >= least and (noise <= self._change or steps >= REMEMBERED_STEPS)

    def _compare(self, seen: _Seen, expected_s: float, speed: Speed) -> None:
        if (skipped := self._skipped) is not None:
            self._skipped = None
            pace = skipped.pace / expected_s
            if 1 / STEEP <= skipped.pace / seen.pace <= STEEP and not 1 / STEEP <= pace <= STEEP:
                self._departed = [skipped._replace(pace=pace)]
        seen = seen._replace(pace=seen.pace / expected_s)
        pace = seen.pace
        noise = max(self._change, self._limit(self._paces))
        if abs(pace - 1) <= noise:
            self._departed.clear()
            self._paces.append(pace)
            if self._unrefined is not None:
                self._unrefined.append(pace)
                if len(self._unrefined) == REFINING_STEPS:
                    self._scale(speed, self._unrefined)
                    self._unrefined = None
                    self._refined_at = self._shape
            elif len(self._paces) == REMEMBERED_STEPS and abs(median(self._paces) - 1) > self._change:
                # No single step shows a change of this size, but all remembered ones together do: more than half of
                # them are from after the change.
                self._scale(speed, list(self._paces)[REMEMBERED_STEPS // 2 :])
            return
        if self._confirms(seen, noise):
            paces = [one.pace for one in self._departed]
            self._believe(speed.scaled(median(paces)), len(paces), len(paces))
            self._departed.clear()
            self._unrefined = []

    def _confirms(self, seen: _Seen, noise: float) -> bool:
        """Take in a step beyond the noise; return whether it confirms, with those before it, a change of speed."""
        self._departed = [*(one for one in self._departed if (one.pace > 1) == (seen.pace > 1)), seen]
        least = min(max(one.pace, 1 / one.pace) for one in self._departed)
        seconds = sum(one.passed_s for one in self._departed)
        if least > 1 + PLAIN * noise and seconds >= max(PLAIN_S, self._settling_s):
            return len(self._departed) >= PLAIN_STEPS
        return len(self._departed) >= CONFIRMING_STEPS and seconds >= self._settling_s

    def _scale(self, speed: Speed, paces: Sequence[float]) -> None:
        factor = median(paces)
        self._paces = deque((pace / factor for pace in self._paces), REMEMBERED_STEPS)
        self._believe(speed.scaled(factor), len(paces))

    @staticmethod
    def _limit(paces: Collection[float]) -> float:
        """Return how far a step may be from the median of `paces` by their own noise; 0 where too few are known."""
        if len(paces) < FIRST_STEPS:
            return 0.0
        return NOISE_FACTOR * spread(paces)[1]


def spread(values: Collection[float]) -> tuple[float, float]:
    """Return the median and the standard deviation (median absolute deviation x 1.4826), which outliers hardly move."""
    middle = median(values)
    return middle, 1.4826 * median(abs(value - middle) for value in values)


def slowest(speeds: Sequence[Speed | None], samples: float) -> Speed | None:
    """Return the speed of ranks that work on the same samples: the slowest one's; None until all are known."""
    known = [speed for speed in speeds if speed is not None]
    return max(known, key=lambda speed: speed.time_s(samples, 1)) if len(known) == len(speeds) else None


class StepShape(NamedTuple):
    """A rank's samples in a step."""

    samples: int
    micro_batches: int

    @property
    def sizes(self) -> set[int]:
        """Return how many samples a micro-batch has."""
        return {self.samples // self.micro_batches, -(-self.samples // self.micro_batches)}

    def differs(self, other: StepShape) -> bool:
        """Return whether the two shapes' times tell what is fixed from what grows with the samples."""
        return self.apart(other) >= TELLING

    def apart(self, other: StepShape) -> float:
        """Return the relative difference of the micro-batches' sizes: a micro-batch's time depends on its own alone."""
        sizes = self.samples / self.micro_batches, other.samples / other.micro_batches
        return abs(sizes[0] - sizes[1]) / max(sizes)


def through(before: StepShape, known: Speed, now: StepShape, measured_s: float) -> Speed:
    """Return the speed that explains both the time known for one shape and that measured for another.

    Where no fixed part of 0 or more does, the device itself has become slower or faster: the known speed is scaled.
    """
    known_s = known.time_s(*before)
    determinant = before.micro_batches * now.samples - now.micro_batches * before.samples
    if determinant:
        fixed_s = (known_s * now.samples - measured_s * before.samples) / determinant
        per_sample_s = (measured_s * before.micro_batches - known_s * now.micro_batches) / determinant
        if fixed_s >= 0 and per_sample_s > 0:
            return Speed(fixed_s, per_sample_s)
    return known.scaled(measured_s / known.time_s(*now))


# How much longer than usual each rank computes, whatever work its layout gives it.
#
# Ranks of one pipeline stage do the same work, so what is usual is learnt from them together: the median. It is learnt
# once for each layout, with what was known of the ranks before: a rank that has a stage to itself after a change of
# layout is as slow as it was.


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


# The size of the buckets in which gradients are summed, found by tries in a run's first steps.
#
# A large bucket pays the latency of an exchange once for many gradients, and leaves more of the last exchange without
# a backward to hide it: b* = sqrt(S a B), of S bytes, latency a and bandwidth B, balances both. Steps take sizes
# around it in turns, and the one whose exchanges are waited for least is kept. All ranks see the same figures and
# decide alike.


ONE_BY_ONE = 0
"""Each block's gradients by themselves."""
WARM_STEPS, ROUNDS = 3, 3
"""The first steps of a start connect and warm up; then each size is tried so often."""
SPREAD = 4
"""A size is so many times the one below it."""
WORTH, BETTER = 0.01, 0.95
"""Sizes are tried where this part of a step is spent waiting, and one is taken for better below this part of that of
the first."""


def sizes_to_try(total_bytes: int, block_bytes: int, planned_bytes: float | None) -> tuple[int, ...]:
    """Return sizes in the order in which they are preferred, `planned_bytes` (b*) first where it is known; none where
    there is one block alone, the largest of which has `block_bytes`."""
    if total_bytes <= block_bytes:
        return ()
    middle = planned_bytes or math.sqrt(total_bytes * block_bytes)
    sizes = [_between(ONE_BY_ONE, middle * factor, total_bytes) for factor in (1, SPREAD, 1 / SPREAD)]
    first = [sizes[0], ONE_BY_ONE] if planned_bytes else [ONE_BY_ONE, sizes[0]]
    return tuple(dict.fromkeys(size if size > block_bytes else ONE_BY_ONE for size in (*first, *sizes[1:])))


def _between(least: float, size: float, most: float) -> int:
    return round(min(max(size, least), most))


@dataclass
class BucketTries:
    """Tries `sizes` in turns, step after step."""

    sizes: Sequence[int]
    waited_s: dict[int, list[float]] = field(default_factory=dict)
    is_done: bool = False

    @property
    def size(self) -> int:
        """Return the size of the next step's buckets: in the end the best."""
        if self.is_done:
            return self.best
        return min(self.sizes, key=lambda size: len(self.waited_s.get(size, ())))

    @property
    def best(self) -> int:
        """Return the size that is waited for least, or the first one where that is hardly longer."""
        usual_s = self.usual_s
        least = min(usual_s, key=lambda size: usual_s[size])
        return least if usual_s[least] < BETTER * usual_s.get(self.sizes[0], math.inf) else self.sizes[0]

    @property
    def usual_s(self) -> dict[int, float]:
        """Return how long a step waits for gradients with each size that was tried."""
        return {size: median(seconds) for size, seconds in self.waited_s.items()}

    def note(self, size: int, waited_s: float, step_s: float) -> None:
        """Take in a step with buckets of `size`, of whose `step_s` the ranks have waited `waited_s` on average."""
        if size not in self.sizes or self.is_done:
            return
        self.waited_s.setdefault(size, []).append(waited_s)
        has_all = all(len(self.waited_s.get(one, ())) >= ROUNDS for one in self.sizes)
        is_first = sum(map(len, self.waited_s.values())) == 1
        self.is_done = has_all or (is_first and waited_s < WORTH * step_s)
