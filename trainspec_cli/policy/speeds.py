"""How fast a rank computes: its time for a micro-batch by the samples in it, and when that has changed.

A rank's own compute time shows its speed; a whole step's does not, since all ranks wait for the slowest. A change is
confirmed when several steps in a row lie beyond what the rank's own noise explains; Greyhound (arXiv:2410.12588)
confirms changes of 10% and more, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

FIRST_STEPS = 8
"""A speed is learnt from so many steps, and from more where they differ."""
SKIPPED_STEPS = 2
"""The first steps after a start, or with other shares, compile and warm up: they say nothing."""
CONFIRMING_STEPS = 3
"""So many steps in a row confirm a change."""
SETTLING_S = 1.0
"""What a machine does for less time than this beside the run, in short steps, is no change of a rank's speed."""
REFINING_STEPS = 10
"""After a change, of the speed or of the shares, so many steps that show none set the speed to their median: the few
that confirmed it are noisy."""
REMEMBERED_STEPS = 50
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

    def time_s(self, samples: float, micro_batches: int) -> float:
        """Return the seconds that `samples` in so many micro-batches take."""
        return micro_batches * self.fixed_s + samples * self.per_sample_s

    def scaled(self, factor: float) -> Speed:
        return Speed(self.fixed_s * factor, self.per_sample_s * factor)


class SpeedTracker:
    """One rank's speed, learnt from its own steps."""

    def __init__(self, change: float, settling_s: float = 0.0):
        """`change`: the smallest relative change that is confirmed. `settling_s`: steps that show a speed, or a change
        of it, are so many seconds of computing at least."""
        self._change, self._settling_s = change, settling_s
        self._speed: Speed | None = None
        self._learnt = StepShape(0, 1)
        """The shape of the steps that the speed was learnt from."""
        self._learning_s: list[float] = []
        self._paces: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """Measured time over expected time, of steps that showed no change."""
        self._departed: list[float] = []
        """The same of the last steps in a row that did."""
        self._unrefined: list[float] | None = None
        """The same of the steps since a change; None where the speed is refined."""
        self._refined_at = StepShape(0, 1)
        self._shape, self._steps = StepShape(0, 1), 0
        """The shape of the last steps, and how many in a row had it."""

    @property
    def speed(self) -> Speed | None:
        """Return the confirmed speed; None until enough steps were seen."""
        return self._speed

    def note(self, samples: int, micro_batches: int, compute_s: float) -> None:
        """Take in a step of so many samples, of which this rank's own computing took `compute_s`."""
        shape = StepShape(samples, micro_batches)
        if shape != self._shape:
            self._shape, self._steps = shape, 0
            if samples and shape.apart(self._refined_at) >= OFF_THE_LINE:
                self._unrefined = []
            self._departed.clear()
            self._learning_s.clear()
        self._steps += 1
        if self._steps <= SKIPPED_STEPS or not samples or compute_s <= 0:
            return
        if self._speed is None or self._learnt.differs(shape):
            self._learn(compute_s)
        else:
            self._compare(compute_s, self._speed)

    def _learn(self, compute_s: float) -> None:
        """Learn until the median is known well enough not to be taken for a change."""
        self._learning_s.append(compute_s)
        steps, measured_s = len(self._learning_s), median(self._learning_s)
        paces = [step_s / measured_s for step_s in self._learning_s]
        if sum(self._learning_s) < self._settling_s:
            return
        if steps < FIRST_STEPS or (steps < REMEMBERED_STEPS and self._limit(paces) / math.sqrt(steps) > self._change):
            return
        if self._speed is None:
            self._speed = Speed(0.0, measured_s / self._shape.samples)
        else:
            self._speed = through(self._learnt, self._speed, self._shape, measured_s)
        self._learnt = self._refined_at = self._shape
        self._unrefined = None
        self._learning_s.clear()
        self._paces.extend(paces)

    def _compare(self, compute_s: float, speed: Speed) -> None:
        pace = compute_s / speed.time_s(*self._shape)
        if abs(pace - 1) <= max(self._change, self._limit(self._paces)):
            self._departed.clear()
            self._paces.append(pace)
            self._refine(pace, speed)
            return
        same_side = [earlier for earlier in self._departed if (earlier > 1) == (pace > 1)]
        self._departed = [*same_side, pace]
        seconds = sum(self._departed) * speed.time_s(*self._shape)
        if len(self._departed) >= CONFIRMING_STEPS and seconds >= self._settling_s:
            self._speed = speed.scaled(median(self._departed))
            self._departed.clear()
            self._unrefined = []

    def _refine(self, pace: float, speed: Speed) -> None:
        """Set the speed anew where that is due after a change, or where the remembered steps together show a change
        that no single one does."""
        if self._unrefined is not None:
            self._unrefined.append(pace)
            if len(self._unrefined) == REFINING_STEPS:
                self._scale(speed, median(self._unrefined))
                self._unrefined, self._refined_at = None, self._shape
        elif len(self._paces) == REMEMBERED_STEPS and abs(median(self._paces) - 1) > self._change:
            self._scale(speed, median(list(self._paces)[REMEMBERED_STEPS // 2 :]))  # more than half have changed

    def _scale(self, speed: Speed, factor: float) -> None:
        self._speed = speed.scaled(factor)
        self._paces = deque((pace / factor for pace in self._paces), REMEMBERED_STEPS)

    @staticmethod
    def _limit(paces: Collection[float]) -> float:
        """Return how far a step may be from the median of `paces` by their own noise; 0 where too few are known."""
        if len(paces) < FIRST_STEPS:
            return 0.0
        middle = median(paces)
        return NOISE_FACTOR * 1.4826 * median(abs(pace - middle) for pace in paces)


def slowest(speeds: Sequence[Speed | None], samples: float) -> Speed | None:
    """Return the speed of ranks that work on the same samples: the slowest one's; None until all are known."""
    known = [speed for speed in speeds if speed is not None]
    return max(known, key=lambda speed: speed.time_s(samples, 1)) if len(known) == len(speeds) else None


class StepShape(NamedTuple):
    """A rank's samples in a step."""

    samples: int
    micro_batches: int

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
