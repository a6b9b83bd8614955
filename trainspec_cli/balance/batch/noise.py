"""The gradient noise scale: measured from what data-parallel ranks exchange anyway, and the batch that follows it.

The gradient of one sample has the mean mu and the covariance S. Of B samples that n ranks share, rank i's mean gradient
g_i over its part w_i of them (the w_i sum to 1) has E|g_i|^2 = |mu|^2 + tr S / (w_i B), and their sum g = sum w_i g_i
has E|g|^2 = |mu|^2 + tr S / B. Both are solved for tr S and |mu|^2; B_noise = tr S / |mu|^2 is the simple noise scale
(McCandlish et al., arXiv:1812.06162). Both are sums over parameters, some of which may be divided in other parts:
experts are trained by several ranks' samples together.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from trainspec_cli.recipe.keys.batching import BatchingSpec


@dataclass(frozen=True)
class NoiseMeasurement:
    """Unbiased estimates from one step; each may be far off, and below 0."""

    trace: float
    """tr S: the variance of one sample's gradient, summed over the parameters."""
    square: float
    """|mu|^2 of the expected gradient."""


@dataclass(frozen=True)
class PartSquares:
    """Squared norms of one step's gradient, taken before clipping, of parameters that are divided in the same parts."""

    weighted_square: float
    """Sum of w_i |g_i|^2 over the parts, of their mean gradients and fractions of the step; equal fractions 1/n make it
    their plain mean."""
    square: float
    """|g|^2 of the mean over all samples."""
    parts: int
    """Micro-batches that had samples."""


def measure_noise(samples: int, squares: Sequence[PartSquares]) -> NoiseMeasurement:
    """Estimate the noise of one step's gradient.

    Raises ValueError for fewer than two parts: their difference is all that is known of the noise.
    """
    if (fewest := min(of.parts for of in squares)) < 2:
        raise ValueError(f"the noise of a gradient shows between parts, and {fewest} had samples")
    trace = sum(samples * (of.weighted_square - of.square) / (of.parts - 1) for of in squares)
    return NoiseMeasurement(trace, sum(of.square for of in squares) - trace / samples)


@dataclass(frozen=True)
class NoiseAverage:
    """Exponential averages of a run's measurements."""

    trace: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    """The sum of the measurements' weights: 1 after many. It corrects the bias of averages that begin at 0."""

    def updated(self, measured: NoiseMeasurement, smoothing_steps: int) -> NoiseAverage:
        """Return the averages with one more step, which weighs 1 / `smoothing_steps`.

        What is not finite is passed over, as the update of its step is.
        """
        if not (math.isfinite(measured.trace) and math.isfinite(measured.square)):
            return self
        part = 1 / smoothing_steps
        return NoiseAverage(
            self.trace + part * (measured.trace - self.trace),
            self.square + part * (measured.square - self.square),
            self.weight + part * (1 - self.weight),
        )

    @property
    def mean(self) -> NoiseMeasurement | None:
        """The averages without their bias; None before the first measurement."""
        return NoiseMeasurement(self.trace / self.weight, self.square / self.weight) if self.weight else None

    @property
    def settled(self) -> bool:
        """Return whether at least as many steps were measured as the averages are smoothed over.

        After n of them, each weighing 1/n, the weight is 1 - (1 - 1/n)^n, which is 1 - 1/e or a little more.
        """
        return self.weight >= 1 - math.exp(-1)

    @property
    def noise_scale(self) -> float | None:
        """B_noise in samples; None before the first measurement.

        A ratio of averages: the average of the ratios is biased. Infinite where |mu|^2 is lost in the noise.
        """
        mean = self.mean
        if mean is None:
            return None
        return max(0.0, mean.trace) / mean.square if mean.square > 0 else math.inf


@dataclass(frozen=True)
class BatchPace:
    """The state of a run's batch schedule: a checkpoint holds it, so that a resumed run decides the same."""

    size: int
    """Samples of the steps to come, under the schedule `noise`."""
    noise: NoiseAverage


def next_size(batching: BatchingSpec, size: int, noise_scale: float | None) -> int:
    """Return the samples of the steps to come, of which there were `size`, by the schedule `noise`.

    One size up when the aim (`noise_fraction` of the noise scale) reaches the next size, and one down
    when it is below the size before: between the two a size stays, so that noise in the measurement moves nothing.
    Without a measurement it stays too. Called every `interval_steps` steps.
    """
    sizes = batching.sizes_up_to(batching.schedule.max_global_batch_size or batching.global_batch_size)
    place = max(0, bisect_right(sizes, size) - 1)
    if noise_scale is None:
        return sizes[place]
    aim = batching.schedule.noise_fraction * noise_scale
    if place + 1 < len(sizes) and aim >= sizes[place + 1]:
        return sizes[place + 1]
    return sizes[place - 1] if place and aim < sizes[place - 1] else sizes[place]


GROWS_BY_ITSELF = ("ramp", "seesaw")
"""Schedules whose batch grows whatever the noise is."""
EQUIVALENT_FRACTION = 0.5
"""Up to this part of the noise scale B_n, a larger batch at a larger rate trains nearly as the first size does.

The square root of the batch is the rate for a gradient that is lost in its noise. Beside a gradient AdamW's normaliser
falls less: to move as far, the rate would have to be sqrt((B_n + B) / (B_n + B0)) times larger at B than at B0, by up
to 22% at B = B_n / 2. Measured (docs/benchmarks.md): no loss at a sixth of B_n, 0.4% at a third, 1% at two thirds."""


def outgrows_noise(batching: BatchingSpec, samples: int, noise: NoiseAverage) -> bool:
    """Return whether a schedule has grown the batch to `samples`, beyond half the gradient noise scale.

    A larger batch with a larger rate trains as a smaller batch with a smaller rate while the noise outweighs the
    gradient (arXiv:2205.10287; arXiv:2510.14717). Only settled averages count.
    """
    grown = batching.schedule.kind in GROWS_BY_ITSELF and samples > batching.global_batch_size
    scale = noise.noise_scale
    return grown and noise.settled and scale is not None and samples > EQUIVALENT_FRACTION * scale
