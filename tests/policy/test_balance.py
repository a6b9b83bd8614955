"""Samples divided over ranks of different speeds: exact, within memory, and even where that is as good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.policy.balance import best_division, compute_s, solve_counts
from trainspec_cli.policy.division import Division
from trainspec_cli.policy.speeds import Speed

EVEN = Division((1.0,) * 4, micro_batch_size=8)
ONE_SLOW = (Speed(0, 1), Speed(0, 1), Speed(0, 1.8), Speed(0, 1))


def slowest_s(counts: Sequence[int], micro_batches: int, speeds: Sequence[Speed]) -> float:
    return max(speed.time_s(count, micro_batches) for count, speed in zip(counts, speeds, strict=True))


def all_counts(samples: int, ranks: int, least: int, most: int) -> Iterator[tuple[int, ...]]:
    if ranks == 1:
        if least <= samples <= most:
            yield (samples,)
        return
    for first in range(least, min(most, samples) + 1):
        yield from ((first, *rest) for rest in all_counts(samples - first, ranks - 1, least, most))


speeds_of_ranks = st.lists(
    st.builds(Speed, st.sampled_from([0.0, 0.5, 3.0, 20.0]), st.sampled_from([0.5, 1.0]) | st.floats(0.1, 4)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(speeds=speeds_of_ranks, samples=st.integers(0, 14), most=st.integers(1, 14), micro_batches=st.integers(1, 3))
def test_no_other_whole_numbers_are_faster(speeds: list[Speed], samples: int, most: int, micro_batches: int) -> None:
    if samples > most * len(speeds):
        with pytest.raises(ValueError, match="are more than"):
            solve_counts(samples, micro_batches, speeds, most)
        return
    counts = solve_counts(samples, micro_batches, speeds, most)
    least = 1 if samples >= len(speeds) else 0
    assert sum(counts) == samples
    assert all(least <= count <= most for count in counts)
    best_s = min(slowest_s(c, micro_batches, speeds) for c in all_counts(samples, len(speeds), least, most))
    assert slowest_s(counts, micro_batches, speeds) == pytest.approx(best_s)


@settings(max_examples=100, deadline=None)
@given(kinds=st.lists(st.integers(0, 2), min_size=8, max_size=8), samples=st.integers(8, 200), most=st.integers(6, 12))
def test_the_time_of_a_division_is_that_of_its_shares(kinds: list[int], samples: int, most: int) -> None:
    """Ranks of few kinds, also where they are many more than their samples tell apart."""
    speeds = [(Speed(0.3, 1.0), Speed(0.1, 1.7), Speed(2.0, 0.4))[kind] for kind in kinds]
    found = best_division(Division((1.0,) * 8, 6), samples, speeds, most, 0.5)
    assert found.compute_s == pytest.approx(compute_s(found.division, samples, speeds, 0.5))
    assert sum(found.division.counts(samples)) == samples


def test_a_slow_rank_takes_less() -> None:
    assert solve_counts(28, 1, ONE_SLOW, 28) == (8, 8, 4, 8)
    assert solve_counts(32, 1, ONE_SLOW, 9) == (9, 9, 5, 9)


def test_thousands_of_ranks_are_divided_like_a_few() -> None:
    speeds = [Speed(0.1, 1.0 + rank % 3) for rank in range(4096)]
    counts = solve_counts(4096 * 64, 4, speeds, 4096)
    assert sum(counts) == 4096 * 64
    assert all(len(set(counts[first::3])) <= 2 for first in range(3))
    level_s = slowest_s(counts, 4, speeds)
    assert all(speed.time_s(count + 1, 4) >= level_s for count, speed in zip(counts, speeds, strict=True))


def test_the_best_division_of_ranks_of_different_speeds() -> None:
    found = best_division(EVEN, 32, ONE_SLOW, 16, 0.0)
    assert found.division.counts(32) == (9, 9, 5, 9)
    assert found.division.count_micro_batches(32) == 1
    assert found.compute_s == 9.0


@pytest.mark.parametrize("speeds", [[Speed(0, 1)] * 4, [Speed(0, 1), Speed(0, 1), Speed(0, 1), Speed(0, 1.01)]])
def test_ranks_that_are_as_fast_are_given_as_much(speeds: list[Speed]) -> None:
    assert best_division(EVEN, 3200, speeds, 1600, 0.0).division == EVEN


@pytest.mark.parametrize("largest", [8, 9, 12, 16])
def test_no_micro_batch_is_larger_than_memory_allows(largest: int) -> None:
    division = best_division(EVEN, 32, ONE_SLOW, largest, 0.0).division
    sizes = [size for rank in range(4) for size in division.of_rank(rank, 0, 32).sizes]
    assert max(sizes) <= largest
    assert division.counts(32) == (9, 9, 5, 9)
    assert division.count_micro_batches(32) == (2 if largest == 8 else 1)


def test_another_micro_batch_is_not_worth_a_dear_exchange() -> None:
    """Two micro-batches save 6 s of computing, and exchange once more."""
    assert compute_s(EVEN, 32, ONE_SLOW, 7.0) == 14.4 + 7
    assert best_division(EVEN, 32, ONE_SLOW, 8, 7.0).division == EVEN
    assert best_division(EVEN, 32, ONE_SLOW, 8, 4.0).compute_s == 9 + 2 * 4.0


def test_the_number_of_micro_batches_is_kept_where_it_counts() -> None:
    assert best_division(EVEN, 32, ONE_SLOW, 8, 0.0, keeps_micro_batches=True).division == EVEN
    kept = best_division(EVEN, 64, ONE_SLOW, 16, 0.0, keeps_micro_batches=True).division
    assert kept.count_micro_batches(64) == EVEN.count_micro_batches(64) == 2
    assert kept.counts(64) == (18, 18, 10, 18)


def test_micro_batches_stay_as_many_where_larger_ones_would_fit() -> None:
    """Fewer would make a pipeline's bubble longer."""
    small = Division((1.0,) * 4, micro_batch_size=1)
    assert best_division(small, 32, ONE_SLOW, 16, 1.0).division.count_micro_batches(32) == 8


def test_micro_batches_come_in_whole_turns() -> None:
    taking_turns = Division((1.0,) * 4, micro_batch_size=8, turns=2)
    assert best_division(taking_turns, 64, ONE_SLOW, 8, 0.0).division.count_micro_batches(64) == 4
