"""Exposed exchange against truths that are put in: known delays, and counts of moments on a grid."""

from __future__ import annotations

import random

import pytest

from trainspec_cli.engine.observe.clock import ExchangeTime, Interval, exchange_time


@pytest.mark.parametrize(
    ("exchanges", "computing", "seconds", "exposed_s"),
    [
        ([], [(0, 9)], 0, 0),
        ([(2, 5)], [], 3, 3),
        ([(2, 5)], [(2, 5)], 3, 0),
        ([(2, 5)], [(0, 2), (5, 7)], 3, 3),
        ([(2, 5), (4, 6), (8, 9)], [(0, 3), (5.5, 8.5)], 5, 3),
        ([(0, 10)], [(1, 2), (4, 6), (5, 7), (9, 12)], 10, 5),
        ([(0, 1), (0, 1), (0, 1)], [(0.25, 0.5), (0.25, 0.5)], 1, 0.75),
        ([(4, 6), (0, 2)], [(5, 9), (1, 2)], 4, 2),
    ],
)
def test_what_is_exposed_is_the_exchange_without_the_computation(
    exchanges: list[Interval], computing: list[Interval], seconds: float, exposed_s: float
) -> None:
    assert exchange_time(exchanges, computing) == ExchangeTime(seconds, exposed_s)


@pytest.mark.parametrize("seed", range(20))
def test_random_intervals_against_moments_that_are_counted(seed: int) -> None:
    """Whole numbers as bounds: every moment between two of them is in an interval or in none."""
    generator = random.Random(seed)

    def draw(most: int) -> list[Interval]:
        begins = [generator.randrange(60) for _ in range(generator.randrange(most))]
        return [(begin, begin + generator.randrange(8)) for begin in begins]

    exchanges, computing = draw(12), draw(12)
    moments = [place + 0.5 for place in range(70)]
    going_on, busy = ([any(b < at < e for b, e in given) for at in moments] for given in (exchanges, computing))
    exposed = sum(one and not other for one, other in zip(going_on, busy, strict=True))
    assert exchange_time(exchanges, computing) == ExchangeTime(sum(going_on), exposed)
