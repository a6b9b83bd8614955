"""Measure how fast a rank computes: the time of a micro-batch as a function of its samples, and when this time changes.
Also measure how much slower than usual each rank of a layout is, and which gradient bucket size leads to the shortest
waits. A rank's own compute time shows its speed. The time of a full step does not, because all ranks wait for the
slowest. A change is confirmed when several consecutive steps lie outside the rank's own noise; fewer steps suffice if
they lie far outside. (Greyhound, arXiv:2410.12588, also confirms changes of 10% and more.)"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import NamedTuple

from trainspec_cli.recipe.keys.layout import Layout

FIRST_STEPS = 8
"""Minimum number of steps to learn a rank's first speed; noisy steps require more."""
SKIPPED_STEPS = 2
"""Number of steps to skip after a start or a change of sample shares, because they include compilation and warm-up."""
CONFIRMING_STEPS = 3
"""Number of consecutive steps that confirm a change."""
CLEAR_FACTOR = 2.0
CLEAR_STEPS = 2
CLEAR_S = 30.0
"""A change of more than `CLEAR_FACTOR` times the noise is clear: `CLEAR_STEPS` consecutive steps confirm it if they
take at least `CLEAR_S` seconds in total. (Work that runs alongside training, such as writing a checkpoint, ends
sooner.)"""
SETTLING_S = 1.0
"""Slow steps that take less time than this in total, in seconds, are due to other work on the machine and not to a
change of a rank's speed."""
REFINING_STEPS = 10
"""After a change in speed or shares, the speed is refined: it becomes the median of this many steps without another
change, because the few steps that confirmed the change are noisy."""
REMEMBERED_STEPS = 50
"""Number of steps that noise is estimated from. After this many steps, a speed is accepted even if it is noisy."""
STEEP = 1.35
"""A change by more than this factor is detected within `CONFIRMING_STEPS` steps, even while a speed is being learnt. If
steps vary by 5%, every change by a factor of 1.5 or more is detected, and noise never is."""
EARLY_NOISE = 1 - 1 / STEEP
"""Noise assigned to a speed that is not settled, so that ranks are treated as equally fast up to the factor `STEEP`."""
SEPARABLE = 0.25
"""The fixed part of a micro-batch's time is fitted only to two sizes that differ by at least this fraction. If they
were closer, noise would be mistaken for a fixed part."""
OFF_THE_LINE = 0.15
"""If the size of micro-batches changes by this fraction, their time may not be on the fitted line, so the speed is
measured again."""
NOISE_FACTOR = 4.0
"""A step is outside the noise if it is more than this many standard deviations (median absolute deviation x 1.4826)
from the median."""


@dataclass(frozen=True)
class Speed:
    """The forward and backward passes of a micro-batch take `fixed_s`, plus `per_sample_s` for each of its samples, in
    seconds."""

    fixed_s: float
    per_sample_s: float
    noise: float = field(default=0.0, compare=False)
    """Relative uncertainty of the speed, from the spread of the steps it was learnt from."""
    shown_steps: int = field(default=0, compare=False)
    """Number of steps that confirmed the speed as a change. The time lost in these steps counts when deciding on a
    response."""
    is_settled: bool = field(default=True, compare=False)
    """True if the speed was learnt from enough steps for small differences to be meaningful."""
    update_s: float = 0.0
    """Time of the rank's update between the passes of two steps, which does not depend on its samples. It is 0 if every
    rank waits for the slowest update."""

    def time_s(self, samples: float, micro_batches: int) -> float:
        """Return the time in seconds of the passes for `samples` samples in `micro_batches` micro-batches."""
        return micro_batches * self.fixed_s + samples * self.per_sample_s

    def step_s(self, samples: float, micro_batches: int) -> float:
        """Return the time in seconds of a step's passes and update."""
        return self.time_s(samples, micro_batches) + self.update_s

    def scaled(self, factor: float) -> Speed:
        return replace(
            self,
            fixed_s=self.fixed_s * factor,
            per_sample_s=self.per_sample_s * factor,
            update_s=self.update_s * factor,
        )


def computing_s(parts_s: Mapping[str, float], garbage_s: float) -> float:
    """Return the part of a rank's step time, in seconds, that reflects its speed. Data loading, checkpoints and garbage
    collection (`garbage_s` of the passes) do not reflect how fast a rank computes, and do not shrink with its share of
    the samples."""
    return max(0.0, parts_s["forward"] + parts_s["backward"] - garbage_s)


class _Seen(NamedTuple):
    """A rank's speed as measured in one step."""

    pace: float
    """Compute time, divided by the time that the rank's speed predicts."""
    passed_s: float
    """Duration of the step."""


class SpeedTracker:
    """Tracks one rank's speed from its own steps."""

    def __init__(self, change: float, settling_s: float = 0.0):
        """`change`: the smallest relative change that is confirmed. `settling_s`: minimum total duration of the steps
        that establish a speed or a change."""
        self._change = change
        self._settling_s = settling_s
        self._speed: Speed | None = None
        self._learnt = StepShape(0, 1)
        """The shape (samples and micro-batches) of the steps that determined the speed."""
        self._learning = list[_Seen]()
        """The steps that will determine the next speed. In this list, paces are times in seconds."""
        self._early: Speed | None = None
        """The preliminary speed from these steps, if it differs sharply from the known speed."""
        self._paces: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """The ratio of measured to expected time in steps without a change."""
        self._updates_s: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        """The durations of the latest updates."""
        self._departed = list[_Seen]()
        """The latest consecutive steps that showed a change."""
        self._unrefined: list[float] | None = None
        """Paces of the steps since a change; None once the speed is refined."""
        self._refined_at = StepShape(0, 1)
        self._shape, self._steps = StepShape(0, 1), 0
        """The shape of the latest steps, and the number of consecutive steps that had it."""
        self._skipped: _Seen | None = None
        """The last skipped step with this shape. It counts towards a sharp change if the following steps also show the
        change."""

    @property
    def speed(self) -> Speed | None:
        """Return the confirmed speed; None until enough steps have been measured."""
        return self._speed

    @property
    def estimate(self) -> Speed | None:
        """Return the preliminary speed if the first steps of a shape show a sharp change; otherwise return the
        confirmed speed."""
        return self._early or self._speed

    def note(
        self, samples: int, micro_batches: int, compute_s: float, waited_s: float = 0.0, update_s: float = 0.0
    ) -> None:
        """Record a step where this rank computed for `compute_s` and waited for others for `waited_s`. Waiting does
        not reflect the rank's speed, but counts towards the duration of the steps. `update_s`: as in `Speed`."""
        shape = StepShape(samples, micro_batches)
        if shape != self._shape:
            self._begin(shape)
        self._steps += 1
        if self._steps < SKIPPED_STEPS or not samples or compute_s <= 0:
            return
        seen = _Seen(compute_s, compute_s + waited_s)
        self._updates_s.append(update_s)
        if self._steps == SKIPPED_STEPS:
            self._skipped = seen
        elif self._speed is None or self._learnt.differs(shape):
            self._learn(seen)
        else:
            self._compare(seen, self._speed.time_s(*shape), self._speed)

    def _begin(self, shape: StepShape) -> None:
        """Start a series of steps with another shape. No warm-up is needed for micro-batch sizes that have been
        processed before."""
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
        """Learn until the error of the median is smaller than a change. A sharp change in the meantime restarts
        learning, because the steps before and after it have no common median, and their spread would be taken for
        noise."""
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
        self._estimate_early(shown or self._learning)
        measured_s = median(one.pace for one in self._learning)
        paces = [one.pace / measured_s for one in self._learning]
        if sum(one.passed_s for one in self._learning) < self._settling_s or not self._are_enough(paces):
            return
        departed = self._learning[len(self._learning) - len(self._departed) :]
        self._departed = [one._replace(pace=one.pace / measured_s) for one in departed]
        found = self._speed_from(measured_s)
        self._learnt = self._refined_at = self._shape
        self._unrefined = None if len(paces) >= FIRST_STEPS else []
        self._learning.clear()
        self._early = self._skipped = None
        self._paces.extend(paces)
        self._accept(found, len(paces))

    def _estimate_early(self, shown: Sequence[_Seen]) -> None:
        """Set a preliminary speed if the known speed does not explain the first steps. It is based on the lower
        quartile of their times, so that single disturbed steps do not count."""
        if len(shown) < CONFIRMING_STEPS or sum(one.passed_s for one in shown) < self._settling_s:
            return
        measured_s = sorted(one.pace for one in shown)[(len(shown) - 1) // 4]
        pace = STEEP * 2 if self._speed is None else measured_s / self._speed.time_s(*self._shape)
        if not 1 / STEEP <= pace <= STEEP:
            found = self._speed_from(measured_s)
            update_s = self._update_s(len(shown))
            self._early = replace(found, noise=EARLY_NOISE, shown_steps=len(shown), is_settled=False, update_s=update_s)

    def _speed_from(self, measured_s: float) -> Speed:
        """Return the speed that matches a step's measured time."""
        if self._speed is None:
            return Speed(0.0, measured_s / self._shape.samples)
        return through(self._learnt, self._speed, self._shape, measured_s)

    def _accept(self, speed: Speed, steps: int, shown_steps: int = 0) -> None:
        """Set the speed to the median of `steps` steps. The standard error of a median is 1.25 deviations /
        sqrt(steps)."""
        noise = 1.25 * self._limit(self._paces) / math.sqrt(steps)
        # A speed is also settled after many steps, regardless of the noise. If the steps of one rank always vary
        # widely, its noise never falls below EARLY_NOISE, and decisions that need settled speeds on all ranks would
        # never be made.
        is_settled = noise < EARLY_NOISE or steps >= FIRST_STEPS
        self._speed = replace(
            speed, noise=noise, shown_steps=shown_steps, is_settled=is_settled, update_s=self._update_s(steps)
        )

    def _update_s(self, steps: int) -> float:
        """Return the median update duration over the last `steps` steps that were used to learn a speed."""
        return median(list(self._updates_s)[-steps:])

    def _are_enough(self, paces: Sequence[float]) -> bool:
        """Return whether these steps suffice to learn a speed. A few steps suffice if the rank's noise is known."""
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
                # A change that is too small to show in single steps shows in the median of all remembered steps, once
                # more than half of them come after the change.
                self._scale(speed, list(self._paces)[REMEMBERED_STEPS // 2 :])
            return
        if self._confirms(seen, noise):
            paces = [one.pace for one in self._departed]
            self._accept(speed.scaled(median(paces)), len(paces), len(paces))
            self._departed.clear()
            self._unrefined = []

    def _confirms(self, seen: _Seen, noise: float) -> bool:
        """Record a step outside the noise. Return whether it and the preceding steps confirm a change."""
        self._departed = [*(one for one in self._departed if (one.pace > 1) == (seen.pace > 1)), seen]
        least = min(max(one.pace, 1 / one.pace) for one in self._departed)
        seconds = sum(one.passed_s for one in self._departed)
        if least > 1 + CLEAR_FACTOR * noise and seconds >= max(CLEAR_S, self._settling_s):
            return len(self._departed) >= CLEAR_STEPS
        return len(self._departed) >= CONFIRMING_STEPS and seconds >= self._settling_s

    def _scale(self, speed: Speed, paces: Sequence[float]) -> None:
        factor = median(paces)
        self._paces = deque((pace / factor for pace in self._paces), REMEMBERED_STEPS)
        self._accept(speed.scaled(factor), len(paces))

    @staticmethod
    def _limit(paces: Collection[float]) -> float:
        """Return how far noise can move a step from the median of `paces`; 0 if there are too few paces."""
        if len(paces) < FIRST_STEPS:
            return 0.0
        return NOISE_FACTOR * spread(paces)[1]


def spread(values: Collection[float]) -> tuple[float, float]:
    """Return the median, and a robust estimate of the standard deviation (median absolute deviation x 1.4826)."""
    middle = median(values)
    return middle, 1.4826 * median(abs(value - middle) for value in values)


def slowest(speeds: Sequence[Speed | None], samples: float) -> Speed | None:
    """Return the slowest speed among ranks that work on the same samples; None until all speeds are known."""
    known = [speed for speed in speeds if speed is not None]
    return max(known, key=lambda speed: speed.step_s(samples, 1)) if len(known) == len(speeds) else None


class StepShape(NamedTuple):
    """The number of samples and micro-batches of a rank in a step."""

    samples: int
    micro_batches: int

    @property
    def sizes(self) -> set[int]:
        """Return the micro-batch sizes in samples."""
        return {self.samples // self.micro_batches, -(-self.samples // self.micro_batches)}

    def differs(self, other: StepShape) -> bool:
        """Return whether the shapes differ enough to fit a fixed time and a time per sample."""
        return self.apart(other) >= SEPARABLE

    def apart(self, other: StepShape) -> float:
        """Return the relative difference between the micro-batch sizes, which determine the times."""
        sizes = self.samples / self.micro_batches, other.samples / other.micro_batches
        return abs(sizes[0] - sizes[1]) / max(sizes)


def through(before: StepShape, known: Speed, now: StepShape, measured_s: float) -> Speed:
    """Return the speed that explains both the known time of one shape and the measured time of another. If the fixed
    part would have to be negative, the device itself has become slower or faster, so the known speed is scaled."""
    known_s = known.time_s(*before)
    determinant = before.micro_batches * now.samples - now.micro_batches * before.samples
    if determinant:
        fixed_s = (known_s * now.samples - measured_s * before.samples) / determinant
        per_sample_s = (measured_s * before.micro_batches - known_s * now.micro_batches) / determinant
        if fixed_s >= 0 and per_sample_s > 0:
            return Speed(fixed_s, per_sample_s)
    return known.scaled(measured_s / known.time_s(*now))


# How much longer than usual each rank computes, regardless of the work that its layout assigns to it.


class PaceTracker:
    def __init__(self, change: float):
        """`change`: a rank is considered usual if its time differs from the usual time by at most this fraction."""
        self._change = change
        self._paces: tuple[float, ...] = ()
        self._layout: Layout | None = None
        self._usual_s: list[float] = []
        """Usual compute time of the ranks in each pipeline stage."""

    def note(self, layout: Layout, times_s: Sequence[float]) -> tuple[float, ...]:
        """Record the compute time of each global rank in a step with even sample shares. Return the ratio of each to
        the usual time, or 1 if it is considered usual."""
        rows = [times_s[slice(*place)] for place in _stages(layout)]
        if layout != self._layout:
            known = self._paces if len(self._paces) == len(times_s) else (1.0,) * len(times_s)
            paces = [known[slice(*place)] for place in _stages(layout)]
            self._layout, self._usual_s = layout, list(map(_usual_s, rows, paces))
        ratios = [time_s / usual_s for row, usual_s in zip(rows, self._usual_s, strict=True) for time_s in row]
        self._paces = tuple(1.0 if abs(ratio - 1) <= self._change else ratio for ratio in ratios)
        return self._paces


def _stages(layout: Layout) -> list[tuple[int, int]]:
    """Return the range of global ranks of each pipeline rank as (first, end); `pp` is the outermost axis."""
    size = layout.world_size // layout.pp
    return [(stage * size, (stage + 1) * size) for stage in range(layout.pp)]


def _usual_s(times_s: Sequence[float], paces: Sequence[float]) -> float:
    return median_low(time_s / pace for time_s, pace in zip(times_s, paces, strict=True))


# Find the bucket size for reducing gradients, by trying several sizes in a run's first steps.
#
# Large buckets incur the latency of an exchange only once for many gradients, but leave more of the last exchange
# exposed after the backward pass. The optimum is b* = sqrt(S a B), for S bytes, latency a and bandwidth B. The first
# steps try sizes around b* in turn, and the run keeps the size with the shortest waits. All ranks see the same
# measurements and make the same decision.


ONE_BY_ONE = 0
"""The bucket size that stands for one bucket per block."""
WARM_STEPS = 3
"""Number of steps after a start that are not used as trials, because they include connection set-up and warm-up."""
ROUNDS = 3
"""Number of trials of each size."""
SPREAD = 4
"""Ratio between neighbouring sizes."""
WORTH = 0.01
"""Other sizes are tried only if at least this fraction of a step is spent waiting for gradients."""
BETTER = 0.95
"""The initial size is replaced only by a size whose waits are below this fraction of its own."""


def sizes_to_try(total_bytes: int, block_bytes: int, planned_bytes: float | None) -> tuple[int, ...]:
    """Return sizes in order of preference, starting with `planned_bytes` (b*) if it is known; empty if there is only
    one block. `block_bytes`: size of the largest block's gradients."""
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
    """Runs trials of `sizes` in turn, one per step."""

    sizes: Sequence[int]
    waited_s: dict[int, list[float]] = field(default_factory=dict)
    is_done: bool = False

    @property
    def size(self) -> int:
        """Return the bucket size for the next step; after the trials, the best one."""
        if self.is_done:
            return self.best
        return min(self.sizes, key=lambda size: len(self.waited_s.get(size, ())))

    @property
    def best(self) -> int:
        """Return the size with the shortest waits, or the first size if its waits are not much longer."""
        usual_s = self.usual_s
        least = min(usual_s, key=lambda size: usual_s[size])
        return least if usual_s[least] < BETTER * usual_s.get(self.sizes[0], math.inf) else self.sizes[0]

    @property
    def usual_s(self) -> dict[int, float]:
        """Return the median wait for gradients per step for each size that was tried."""
        return {size: median(seconds) for size, seconds in self.waited_s.items()}

    def note(self, size: int, waited_s: float, step_s: float) -> None:
        """Record a step of `step_s` seconds with buckets of `size` bytes and a mean wait of `waited_s` seconds."""
        if size not in self.sizes or self.is_done:
            return
        self.waited_s.setdefault(size, []).append(waited_s)
        has_all = all(len(self.waited_s.get(one, ())) >= ROUNDS for one in self.sizes)
        is_first = sum(map(len, self.waited_s.values())) == 1
        self.is_done = has_all or (is_first and waited_s < WORTH * step_s)
