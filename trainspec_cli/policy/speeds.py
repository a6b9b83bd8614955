"""How fast a rank computes: its time for a micro-batch by the samples in it, and when that has changed.

A rank's own compute time shows its speed; a whole step's does not, since all ranks wait for the slowest. A change is
confirmed when several steps in a row lie beyond what the rank's own noise explains; Greyhound (arXiv:2410.12588)
confirms changes of 10% and more, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

FIRST_STEPS = 5
"""The speed is first known after so many steps."""
SKIPPED_STEPS = 2
"""The first steps after a start, or with other shares, compile and warm up: they say nothing."""
CONFIRMING_STEPS = 3
"""So many steps in a row confirm a change."""
REFINING_STEPS = 10
"""After so many steps that showed no change the speed is set to their median: the first few are noisy, and micro-
batches of another size lie off the line that was assumed."""
OFF_THE_LINE = 0.15
"""Micro-batches whose size is other by this fraction."""
REMEMBERED_STEPS = 50
TELLING = 0.3
"""Sizes of micro-batches that are closer than this fraction say too little of what is fixed and what grows with them:
the steps' noise would be taken for it."""
NOISE_FACTOR = 4.0
"""A step is beyond the noise at so many standard deviations (median absolute deviation x 1.4826)."""


@dataclass(frozen=True)
class Speed:
    """Seconds of a micro-batch's forward and backward: `fixed_s` and `per_sample_s` for each sample in it."""

    fixed_s: float
    per_sample_s: float

    def time_s(self, samples: float, micro_batches: int) -> float:
        """Return the seconds that `samples` in so many micro-batches take."""
        return micro_batches * self.fixed_s + samples * self.per_sample_s

    def scaled(self, factor: float) -> Speed:
        return Speed(self.fixed_s * factor, self.per_sample_s * factor)


class SpeedTracker:
    """One rank's speed, learned from its own steps."""

    def __init__(self, change: float):
        """`change`: the smallest relative change that is confirmed."""
        self._change = change
        self._speed: Speed | None = None
        self._pace: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """Measured time over expected time, in steps that showed no change."""
        self._departed: list[float] = []
        """The same of the last steps in a row that did."""
        self._shape = Shape(0, 0)
        self._learnt: Shape | None = None
        """The shape of the steps that the speed was learnt from."""
        self._learning_s: list[float] = []
        self._skipped = 0
        self._unrefined: list[float] = []
        """The pace of the steps that the speed will be refined from."""
        self._refined_at: Shape | None = None

    @property
    def speed(self) -> Speed | None:
        """Return the confirmed speed; None until enough steps were seen."""
        return self._speed

    def note(self, samples: int, micro_batches: int, compute_s: float) -> None:
        """Take in a step of so many samples, of which this rank's own computing took `compute_s`."""
        shape = Shape(samples, micro_batches)
        if shape != self._shape:
            self._shape, self._skipped = shape, 0
            if samples and self._refined_at is not None and shape.apart(self._refined_at) >= OFF_THE_LINE:
                self._begin_refining()
            self._departed.clear()
            self._learning_s.clear()
        self._skipped += 1
        if self._skipped <= SKIPPED_STEPS or not samples or compute_s <= 0:
            return
        if self._learnt is None or self._learnt.differs(shape):
            self._learn(compute_s)
        else:
            self._compare(compute_s)

    def _learn(self, compute_s: float) -> None:
        self._learning_s.append(compute_s)
        if len(self._learning_s) < FIRST_STEPS:
            return
        measured_s = median(self._learning_s)
        if self._speed is None or self._learnt is None:
            self._speed = Speed(0.0, measured_s / self._shape.samples)
        else:
            self._speed = through(self._learnt, self._speed, self._shape, measured_s)
        self._learnt = self._shape
        self._learning_s.clear()

    def _compare(self, compute_s: float) -> None:
        assert self._speed is not None, "a speed was learnt"
        pace = compute_s / self._speed.time_s(*self._shape)
        apart = abs(pace - 1)
        if apart <= self._change or apart <= NOISE_FACTOR * self._noise():
            self._departed.clear()
            self._pace.append(pace)
            self._refine(pace)
            return
        same_side = [earlier for earlier in self._departed if (earlier > 1) == (pace > 1)]
        self._departed = [*same_side, pace]
        if len(self._departed) == CONFIRMING_STEPS:
            self._speed = self._speed.scaled(median(self._departed))
            self._departed.clear()
            self._pace.clear()
            self._begin_refining()

    def _begin_refining(self) -> None:
        self._unrefined, self._refined_at = [], None

    def _refine(self, pace: float) -> None:
        if self._refined_at is not None:
            return
        self._unrefined.append(pace)
        if len(self._unrefined) == REFINING_STEPS:
            assert self._speed is not None, "a speed was learnt"
            usual = median(self._unrefined)
            self._speed = self._speed.scaled(usual)
            self._pace = deque((earlier / usual for earlier in self._pace), maxlen=REMEMBERED_STEPS)
            self._refined_at = self._shape

    def _noise(self) -> float:
        """Return the standard deviation of the usual pace; 0 where too few steps are known."""
        if len(self._pace) < FIRST_STEPS:
            return 0.0
        middle = median(self._pace)
        return 1.4826 * median(abs(pace - middle) for pace in self._pace)


def slowest(speeds: Sequence[Speed | None], samples: float) -> Speed | None:
    """Return the speed of ranks that work on the same samples: the slowest one's; None until all are known."""
    known = [speed for speed in speeds if speed is not None]
    return max(known, key=lambda speed: speed.time_s(samples, 1)) if len(known) == len(speeds) else None


class Shape(NamedTuple):
    """A rank's samples in a step."""

    samples: int
    micro_batches: int

    def differs(self, other: Shape) -> bool:
        """Return whether the two shapes' times tell what is fixed from what grows with the samples."""
        return self.apart(other) >= TELLING

    def apart(self, other: Shape) -> float:
        """Return the relative difference of the micro-batches' sizes: a micro-batch's time depends on its own alone."""
        sizes = self.samples / self.micro_batches, other.samples / other.micro_batches
        return abs(sizes[0] - sizes[1]) / max(sizes)


def through(before: Shape, known: Speed, now: Shape, measured_s: float) -> Speed:
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
