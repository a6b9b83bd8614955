"""The noise scale against gradients whose covariance is known, and the sizes that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.balance.batch.batch import (
    NoiseAverage,
    NoiseMeasurement,
    PartSquares,
    measure_noise,
    next_size,
    outgrows_noise,
)
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec

EVEN, UNEVEN = (8,) * 8, (1, 2, 3, 5, 8, 13, 16, 16)


CHUNK_STEPS = 500


def measured_steps(
    parts: tuple[int, ...], mean: np.ndarray, deviation: np.ndarray, steps: int, seed: int
) -> Iterator[NoiseMeasurement]:
    """Measurements of steps whose samples' gradients have `mean` and independent, skewed errors of `deviation`."""
    chance, samples = np.random.default_rng(seed), sum(parts)
    starts = np.cumsum((0, *parts[:-1]))
    for _ in range(0, steps, CHUNK_STEPS):
        errors = chance.exponential(size=(CHUNK_STEPS, samples, len(mean))) - 1
        sums = np.add.reduceat(mean + deviation * errors, starts, axis=1)
        weighted = ((sums**2).sum(axis=2) / parts / samples).sum(axis=1)
        squares = ((sums.sum(axis=1) / samples) ** 2).sum(axis=1)
        for weighted_square, square in zip(weighted, squares, strict=True):
            yield measure_noise(samples, [PartSquares(float(weighted_square), float(square), len(parts))])


@pytest.mark.parametrize("parts", [EVEN, UNEVEN, (48, 16)])
@pytest.mark.parametrize("noise_scale", [20.0, 100.0])
def test_the_noise_scale_is_within_5_percent_where_the_covariance_is_known(parts, noise_scale: float) -> None:
    deviation = np.linspace(0.5, 2.0, 24)
    mean = np.full(24, math.sqrt(float(deviation @ deviation) / noise_scale / 24))
    average = NoiseAverage()
    for measured in measured_steps(parts, mean, deviation, 6000, seed=1):
        average = average.updated(measured, smoothing_steps=6000)
    assert average.mean is not None
    assert average.mean.trace == pytest.approx(float(deviation @ deviation), rel=0.05)
    assert average.mean.square == pytest.approx(float(mean @ mean), rel=0.05)
    assert average.noise_scale == pytest.approx(noise_scale, rel=0.05)


def test_equal_parts_are_the_published_estimator() -> None:
    """|mu|^2 = (nG - L)/(n - 1) and tr S = B (L - G)/(n - 1), of L = mean |g_i|^2 and G = |g|^2."""
    mean_of_ranks, whole, samples, ranks = 7.0, 3.0, 32, 4
    measured = measure_noise(samples, [PartSquares(mean_of_ranks, whole, ranks)])
    assert measured.trace == samples * (mean_of_ranks - whole) / (ranks - 1)
    assert measured.square == pytest.approx((ranks * whole - mean_of_ranks) / (ranks - 1))


def test_ranks_that_agree_have_no_noise() -> None:
    assert measure_noise(16, [PartSquares(4.0, 4.0, 2)]) == NoiseMeasurement(0.0, 4.0)


def test_one_part_measures_nothing() -> None:
    with pytest.raises(ValueError, match="only 1 had"):
        measure_noise(16, [PartSquares(4.0, 4.0, 2), PartSquares(4.0, 4.0, 1)])


def test_parameters_that_are_divided_otherwise_add_up() -> None:
    """Of 24 numbers the last 8 are known for every two ranks' samples together."""
    parts, noise_scale = EVEN, 40.0
    deviation = np.linspace(0.5, 2.0, 24)
    mean = np.full(24, math.sqrt(float(deviation @ deviation) / noise_scale / 24))
    chance, samples, average = np.random.default_rng(3), sum(parts), NoiseAverage()
    for _ in range(6000):
        ranks = (mean + deviation * (chance.exponential(size=(samples, 24)) - 1)).reshape(8, 8, 24).mean(axis=1)
        alone, pairs = ranks[:, :16], ranks[:, 16:].reshape(4, 2, 8).mean(axis=1)
        squares = [
            PartSquares(float((own**2).sum(axis=1).mean()), float((own.mean(axis=0) ** 2).sum()), len(own))
            for own in (alone, pairs)
        ]
        average = average.updated(measure_noise(samples, squares), smoothing_steps=6000)
    assert average.noise_scale == pytest.approx(noise_scale, rel=0.05)


# Averages


def test_the_first_measurement_counts_whole() -> None:
    average = NoiseAverage().updated(NoiseMeasurement(6.0, 2.0), smoothing_steps=100)
    assert average.mean == NoiseMeasurement(pytest.approx(6.0), pytest.approx(2.0))  # type: ignore[arg-type]
    assert average.noise_scale == pytest.approx(3.0)


def test_averages_forget_what_is_older_than_the_smoothing() -> None:
    average = NoiseAverage()
    for trace in [100.0] * 50 + [1.0] * 400:
        average = average.updated(NoiseMeasurement(trace, 1.0), smoothing_steps=40)
    assert average.noise_scale == pytest.approx(1.0, rel=0.01)


def test_numerator_and_denominator_are_averaged_apart() -> None:
    average = NoiseAverage()
    for measured in [NoiseMeasurement(1.0, 1.0), NoiseMeasurement(9.0, 0.25)] * 2000:
        average = average.updated(measured, smoothing_steps=1000)
    assert average.noise_scale == pytest.approx(5.0 / 0.625, rel=0.01)


def test_a_gradient_that_is_lost_in_the_noise_has_an_infinite_noise_scale() -> None:
    assert NoiseAverage().noise_scale is None
    assert NoiseAverage().updated(NoiseMeasurement(1.0, -0.1), 10).noise_scale == math.inf
    assert NoiseAverage().updated(NoiseMeasurement(-1.0, 0.1), 10).noise_scale == 0.0


@pytest.mark.parametrize("measured", [NoiseMeasurement(math.nan, 1.0), NoiseMeasurement(1.0, math.inf)])
def test_a_step_that_is_not_finite_is_passed_over(measured: NoiseMeasurement) -> None:
    average = NoiseAverage().updated(NoiseMeasurement(6.0, 2.0), 10)
    assert average.updated(measured, 10) == average


def averages(noise_scale: float, steps: int, smoothing_steps: int = 10) -> NoiseAverage:
    average = NoiseAverage()
    for _ in range(steps):
        average = average.updated(NoiseMeasurement(noise_scale, 1.0), smoothing_steps)
    return average


@pytest.mark.parametrize("smoothing_steps", [1, 2, 10, 1000])
def test_averages_are_settled_after_as_many_steps_as_they_are_smoothed_over(smoothing_steps: int) -> None:
    assert not averages(1.0, smoothing_steps - 1, smoothing_steps).settled
    assert averages(1.0, smoothing_steps, smoothing_steps).settled


# A batch that outgrows the noise


def growing(kind: str) -> BatchingSpec:
    return BatchingSpec(global_batch_size=64, schedule=BatchScheduleSpec(kind=kind))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["seesaw", "ramp"])
def test_a_grown_batch_outgrows_the_noise_where_it_is_larger_than_half_its_scale(kind: str) -> None:
    settled = averages(200.0, 10)
    assert not outgrows_noise(growing(kind), 96, settled)
    assert outgrows_noise(growing(kind), 104, settled)
    assert not outgrows_noise(growing(kind), 104, averages(200.0, 9)), "too few steps were measured"
    assert not outgrows_noise(growing(kind), 104, NoiseAverage())
    assert not outgrows_noise(growing(kind), 104, averages(math.inf, 10))


def test_a_batch_that_has_not_grown_outgrows_nothing() -> None:
    """The noise scale of the first steps is small in every run."""
    small = averages(1.0, 10)
    assert not outgrows_noise(growing("seesaw"), 64, small)
    assert not outgrows_noise(growing("constant"), 128, small), "it takes what is left of the run at its end"
    assert not outgrows_noise(growing("noise"), 128, small), "its size follows the noise"


# Sizes


def batching(largest: int = 400, growth: float = 2.0, fraction: float = 1.0) -> BatchingSpec:
    schedule = BatchScheduleSpec(
        kind="noise", growth=growth, max_global_batch_size=largest, noise_fraction=fraction
    )  # fmt: skip
    return BatchingSpec(global_batch_size=64, schedule=schedule)


def decide(spec: BatchingSpec, noise_scales: list[float | None], size: int = 64) -> list[int]:
    sizes = []
    for noise_scale in noise_scales:
        size = next_size(spec, size, noise_scale)
        sizes.append(size)
    return sizes


def test_the_size_climbs_one_growth_at_a_time_to_the_largest() -> None:
    assert decide(batching(), [5000.0] * 4) == [128, 256, 256, 256]
    assert decide(batching(), [math.inf] * 3) == [128, 256, 256]


def test_a_size_is_taken_when_the_noise_scale_reaches_it() -> None:
    assert decide(batching(), [127.9, 128.0]) == [64, 128]


def test_a_size_is_left_when_the_noise_scale_is_below_the_one_before() -> None:
    assert decide(batching(), [128.0, 64.1], size=256) == [256, 128]
    assert decide(batching(), [63.0, 1.0, 1.0], size=256) == [128, 64, 64]


def test_noise_in_the_measurement_moves_nothing() -> None:
    """A third more or less about each size: the first rise is all that happens."""
    chance = np.random.default_rng(0)
    for centre in (128.0, 256.0):
        sizes = decide(batching(), [centre * factor for factor in chance.uniform(0.67, 1.33, 500)])
        assert sizes == sorted(sizes)


def test_without_a_measurement_the_size_stays() -> None:
    assert decide(batching(), [None, None], size=128) == [128, 128]


def test_a_fraction_of_the_noise_scale_is_aimed_at() -> None:
    assert decide(batching(fraction=0.25), [511.0, 512.0]) == [64, 128]


def test_a_size_of_a_recipe_that_was_changed_goes_to_the_nearest_below() -> None:
    assert decide(batching(), [None], size=200) == [128]
    assert decide(batching(largest=128), [None], size=256) == [128]


@pytest.mark.parametrize("seed", range(3))
def test_a_run_follows_a_noise_scale_that_grows_and_stays_where_it_does(seed: int) -> None:
    """From 60 to 400 over 2,000 steps; every step of eight ranks is measured, and every hundredth decided on."""
    chance, spec = np.random.default_rng(seed), batching(largest=2000)
    average, size, sizes = NoiseAverage(), 64, []
    for step in range(1, 4001):
        noise_scale = min(400.0, 60 * (400 / 60) ** (step / 2000))
        ranks = math.sqrt(1 / 400) + chance.normal(size=(8, 400)) * math.sqrt(noise_scale / 400 / (size / 8))
        whole = ranks.mean(axis=0)
        measured = measure_noise(size, [PartSquares(float((ranks**2).sum() / 8), float(whole @ whole), 8)])
        average = average.updated(measured, spec.schedule.smoothing_steps)
        if step % spec.schedule.interval_steps == 0:
            size = next_size(spec, size, average.noise_scale)
            sizes.append(size)
    assert sizes == sorted(sizes)
    assert set(sizes) == {64, 128, 256}


@given(first=st.integers(1, 5000), growth=st.floats(1.05, 16), times=st.floats(1, 50))
def test_sizes_rise_to_the_largest_in_parts_of_the_first(first: int, growth: float, times: float) -> None:
    spec = BatchingSpec(global_batch_size=first, schedule=BatchScheduleSpec(growth=growth))
    sizes = spec.sizes_up_to(first * times)
    assert sizes[0] == first
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] <= first * times
    assert all(size % (first // math.gcd(first, 8)) == 0 for size in sizes)
