"""Decisions of many ranks: noise among thousands, rare exchanges of speeds, and shares that need more micro-batches."""

import random

import pytest

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.balance import best_division
from trainspec_cli.balance.decisions.shares import ShareScheduler, equalise, reporting_interval, samples_per_s
from trainspec_cli.balance.decisions.speeds import Speed

RANKS, EACH, CHANGE = 512, 128, 0.1


def even(ranks: int = RANKS) -> Division:
    return Division((1.0,) * ranks, 1)


def noisy(ranks: int, deviation: float) -> list[Speed]:
    chance = random.Random(0)
    return [Speed(0.0, chance.gauss(1.0, deviation)) for _ in range(ranks)]


def test_the_noise_of_many_ranks_is_not_taken_for_speeds() -> None:
    """Of 512 estimates with 1.5% of noise the slowest is 4% off: balanced out, that would look worth a change."""
    speeds = noisy(RANKS, 0.015)
    assert max(speed.per_sample_s for speed in speeds) > 1.03
    scheduler = ShareScheduler(even(), 2, CHANGE)
    assert all(scheduler.note_step(RANKS * EACH, speeds, 0.0) is None for _ in range(100))


def test_a_slow_rank_stands_out_of_the_noise() -> None:
    speeds = noisy(RANKS, 0.015)
    speeds[7] = Speed(0.0, 2.0)
    cleaned = equalise(speeds, EACH, EACH, CHANGE)
    assert cleaned[7] is speeds[7] and len(set(cleaned)) == 2
    change = ShareScheduler(even(), 2, CHANGE).note_step(RANKS * EACH, speeds, 0.0, steps=2)
    assert change is not None
    counts = change.division.counts(RANKS * EACH)
    assert counts[7] < 0.55 * EACH and max(counts) <= EACH + 1


def test_steps_between_two_exchanges_count_as_lost() -> None:
    """10% are lost a step: ten such steps cost as much as a change, however rarely speeds are exchanged."""
    speeds = [*[Speed(0.0, 1.0)] * 7, Speed(0.0, 1.12)]
    for interval in (1, 3, 10):
        scheduler, calls = ShareScheduler(even(8), 2, CHANGE), 1
        while scheduler.note_step(8 * EACH, speeds, 0.0, interval) is None:
            calls += 1
        assert 9 <= calls * interval <= 12


@pytest.mark.parametrize(("ranks", "interval"), [(1, 1), (511, 1), (512, 2), (4096, 9)])
def test_speeds_of_many_ranks_are_exchanged_less_often(ranks: int, interval: int) -> None:
    assert reporting_interval(ranks) == interval


@pytest.mark.parametrize(("step_s", "interval"), [(0.01, 9), (10.0, 5), (30.0, 2), (100.0, 1)])
def test_long_steps_have_the_time_for_each_exchange(step_s: float, interval: int) -> None:
    assert reporting_interval(4096, step_s) == interval
    assert reporting_interval(8, step_s) == 1


def test_even_shares_come_back_though_they_win_little() -> None:
    """64 micro-batches beside 65 are 1.5%: too little to leave even shares for, and for ever."""
    speeds = [Speed(0.0, 1.0)] * 8
    scheduler = ShareScheduler(even(8), 1, CHANGE)
    slow = [Speed(0.0, 2.0), *speeds[1:]]
    changes = [change for _ in range(3) if (change := scheduler.note_step(8 * 64, slow, 0.0))]
    assert len(changes) == 1 and scheduler.division != even(8)
    back = [step for step in range(400) if scheduler.note_step(8 * 64, speeds, 0.0)]
    assert len(back) == 1 and scheduler.division == even(8)


def test_few_ranks_take_over_a_share_that_needs_many_more_micro_batches() -> None:
    """A micro-batch holds one sample: three ranks can take over what a slow one cannot in 18 micro-batches more."""
    speeds = [Speed(0.0, 2.0), *[Speed(0.0, 1.0)] * 3]
    found = best_division(even(4), 4 * 128, speeds, 1, 0.0)
    assert found.compute_s == 147 and found.division.counts(512) == (73, 147, 146, 146)


def test_ranks_together_compute_the_sum_of_their_rates() -> None:
    assert samples_per_s([Speed(0.5, 0.25), None, Speed(0.0, 0.5)]) == 6.0
