"""Intervals against sampling and against closed forms."""

import math
import random

import pytest

from trainspec_cli.planner.run.forecast import propagate, within


def test_a_factor_bounds_both_ways() -> None:
    interval = within(10, 2)
    assert (interval.low, interval.value, interval.high) == (5, 10, 20)


def test_what_is_exact_stays_exact() -> None:
    result = propagate(lambda of: of["a"] * of["b"], {"a": within(3, 1), "b": within(4, 1)})
    assert (result.low, result.value, result.high) == (12, 12, 12)


def test_factors_of_a_product_add_in_quadrature_of_their_logarithms() -> None:
    result = propagate(lambda of: of["a"] / of["b"], {"a": within(6, 1.5), "b": within(2, 1.2)})
    factor = math.exp(math.hypot(math.log(1.5), math.log(1.2)))
    assert result.value == 3
    assert result.high == pytest.approx(3 * factor)
    assert result.low == pytest.approx(3 / factor)


def test_nine_in_ten_samples_of_a_sum_times_a_factor_lie_inside() -> None:
    inputs = {"a": within(5, 1.3), "b": within(2, 1.8), "c": within(7, 1.2)}
    interval = propagate(lambda of: (of["a"] + of["b"]) * of["c"], inputs)
    chance = random.Random(0)

    def sample(name: str) -> float:
        return inputs[name].value * (inputs[name].high / inputs[name].value) ** (chance.gauss(0, 1) / 1.645)

    results = [(sample("a") + sample("b")) * sample("c") for _ in range(5000)]
    inside = sum(interval.low <= result <= interval.high for result in results) / len(results)
    assert inside == pytest.approx(0.9, abs=0.02)
