"""The scheduler tries sizes of buckets and keeps the fastest."""

from __future__ import annotations

import random

import pytest

from trainspec_cli.balance.decisions.speeds import ONE_BY_ONE, ROUNDS, BucketTries, sizes_to_try

BLOCK, TOTAL = 1000, 100_000


def test_sizes_lie_around_the_planned_one_which_comes_first() -> None:
    assert sizes_to_try(TOTAL, BLOCK, 8000) == (8000, ONE_BY_ONE, 32_000, 2000)
    assert sizes_to_try(TOTAL, BLOCK, None) == (ONE_BY_ONE, 10_000, 40_000, 2500), "between one block and all"


def test_sizes_that_make_the_same_buckets_are_one() -> None:
    assert sizes_to_try(TOTAL, BLOCK, 1500) == (1500, ONE_BY_ONE, 6000), "a block is no bucket of fewer bytes"
    assert sizes_to_try(TOTAL, BLOCK, 60_000) == (60_000, ONE_BY_ONE, TOTAL, 15_000), "nothing is more than all"
    assert sizes_to_try(BLOCK, BLOCK, 500) == ()
    assert sizes_to_try(0, 0, None) == (), "gradients that cannot go together"


def tried(sizes: tuple[int, ...], waits_s: dict[int, float], seed: int = 0) -> BucketTries:
    """Tries until they are done; a step's figures are known when the next one has begun."""
    tries, noise = BucketTries(sizes), random.Random(seed)
    running = tries.size
    for _ in range(len(sizes) * (ROUNDS + 1)):
        following = tries.size
        tries.note(running, waits_s[running] * noise.uniform(0.97, 1.03), 1.0)
        running = following
    assert tries.is_done
    return tries


@pytest.mark.parametrize("seed", range(3))
def test_the_size_that_is_waited_for_least_is_kept(seed: int) -> None:
    tries = tried((0, 10, 40), {0: 0.5, 10: 0.3, 40: 0.4}, seed)
    assert tries.best == tries.size == 10
    assert tries.usual_s[40] == pytest.approx(0.4, rel=0.03)


def test_the_first_size_stays_where_no_other_is_clearly_better() -> None:
    assert tried((10, 0), {10: 0.50, 0: 0.495}).best == 10


def test_each_size_is_tried_as_often_and_then_no_more() -> None:
    tries = tried((0, 10), {0: 0.5, 10: 0.3})
    counts = {size: len(seconds) for size, seconds in tries.waited_s.items()}
    assert min(counts.values()) == ROUNDS and max(counts.values()) <= ROUNDS + 1
    tries.note(0, 0.0, 1.0)
    assert tries.best == 10


def test_nothing_is_tried_where_hardly_anything_is_waited_for() -> None:
    tries = BucketTries((10, 0, 40))
    tries.note(0, 0.009, 1.0)
    assert tries.is_done and tries.size == 0, "as the steps before went"


def test_steps_of_another_size_do_not_count() -> None:
    tries = BucketTries((10, 40))
    tries.note(0, 0.001, 1.0)
    assert not tries.is_done and not tries.waited_s
