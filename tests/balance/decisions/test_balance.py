"""Samples divided over ranks of different speeds: exact, within memory, and even where that is as good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.balance.batch.division import Division, divide
from trainspec_cli.balance.decisions.balance import best_division, compute_s, solve_counts, solve_in_step
from trainspec_cli.balance.decisions.speeds import Speed

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


def turns_s(counts: Sequence[int], micro_batches: int, speeds: Sequence[Speed]) -> float:
    """Time of ranks that wait for one another in every micro-batch, one after the other."""
    own = [part.sizes for part in divide(counts, micro_batches, in_step=True)]
    return sum(
        max(speed.time_s(sizes[turn], 1) for speed, sizes in zip(speeds, own, strict=True))
        for turn in range(micro_batches)
    )


@settings(max_examples=150, deadline=None)
@given(speeds=speeds_of_ranks, samples=st.integers(1, 12), most=st.integers(1, 5), micro_batches=st.integers(1, 4))
def test_ranks_that_wait_in_each_micro_batch_lose_little(
    speeds: list[Speed], samples: int, most: int, micro_batches: int
) -> None:
    if samples > micro_batches * most * len(speeds):
        return
    counts = solve_in_step(samples, micro_batches, speeds, most)
    least = 1 if samples >= len(speeds) else 0
    assert sum(counts) == samples
    assert all(least <= count <= micro_batches * most for count in counts)
    possible = all_counts(samples, len(speeds), least, micro_batches * most)
    best_s = min(turns_s(other, micro_batches, speeds) for other in possible)
    found_s = turns_s(counts, micro_batches, speeds)
    assert found_s <= 1.34 * best_s
    assert found_s <= turns_s(solve_counts(samples, micro_batches, speeds, micro_batches * most), micro_batches, speeds)


def test_a_slow_rank_has_smaller_micro_batches_where_all_wait_in_each() -> None:
    """Shares by speed alone, (18, 18, 10, 18), would take 10 s and 10 s: the slow rank's of 5 samples come in turn."""
    speeds, even = [Speed(0, 1), Speed(0, 1), Speed(0, 2), Speed(0, 1)], Division((1.0,) * 4, 8, in_step=True)
    found = best_division(even, 64, speeds, 16, 0.0)
    assert found.compute_s == compute_s(found.division, 64, speeds, 0.0) == 19.0
    assert [own.sizes for own in divide(found.division.counts(64), 2, in_step=True)][2] == (4, 4)


@pytest.mark.parametrize(("largest", "sizes", "seconds"), [(1, 1, 44.0), (2, 1, 37.0)])
def test_fewer_and_larger_micro_batches_make_a_slow_ranks_smaller(largest: int, sizes: int, seconds: float) -> None:
    """With micro-batches of one sample a slow rank is as good as left out: each of its samples takes all two turns."""
    speeds, even = [Speed(0, 1), Speed(0, 1), Speed(0, 2), Speed(0, 1)], Division((1.0,) * 4, 1, in_step=True)
    found = best_division(even, 128, speeds, largest, 0.0)
    assert found.compute_s == compute_s(found.division, 128, speeds, 0.0) == seconds
    assert max(found.division.of_rank(2, 0, 128).sizes) == sizes


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


def test_the_micro_batches_of_a_pipeline_grow_no_larger_than_filling_it_allows() -> None:
    """Two pipelines of two ranks, 32 samples each in micro-batches of 4. In as many as before the faster one's grow to
    43 / 8 and take 9 times that; in 11 they are as large as before, and it takes 12 * 43 / 11."""
    even, speeds = Division((1.0, 1.0), 4, bubble=1.0), (Speed(0, 1), Speed(0, 2))
    division = best_division(even, 64, speeds, 8, 0.0).division
    assert (division.counts(64), division.count_micro_batches(64)) == ((43, 21), 11)
    assert best_division(even, 64, (Speed(0, 1),) * 2, 8, 0.0).division == even


@pytest.mark.parametrize(("fixed_s", "number"), [(0.0, 11), (0.5, 9), (4.0, 8)])
def test_more_micro_batches_in_a_pipeline_are_weighed_against_what_each_costs(fixed_s: float, number: int) -> None:
    speeds = Speed(fixed_s, 1), Speed(fixed_s, 2)

    def step_s(micro_batches: int) -> float:
        counts = solve_counts(64, micro_batches, speeds, 64)
        return slowest_s(counts, micro_batches, speeds) * (1 + 1 / micro_batches)

    division = best_division(Division((1.0, 1.0), 4, bubble=1.0), 64, speeds, 64, 0.0).division
    assert division.count_micro_batches(64) == number == min(range(8, 12), key=step_s)


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


@pytest.mark.parametrize("update_s", [0.0, 4.0, 40.0])
def test_a_slow_update_leaves_a_rank_fewer_samples(update_s: float) -> None:
    speeds = [Speed(0.2, 1.0, update_s=update_s)] * 3 + [Speed(0.2, 1.0, update_s=update_s).scaled(2.0)]
    even = Division((1.0,) * 4, micro_batch_size=64)
    best = best_division(even, 64, speeds, 64, 0.0)
    counts = best.division.counts(64)
    # The best of all shares of the slow rank, with the others' even.
    others = {slow: -(-(64 - slow) // 3) for slow in range(1, 17)}
    best_s = min(max(speeds[0].step_s(most, 1), speeds[3].step_s(slow, 1)) for slow, most in others.items())
    assert best.compute_s == max(speed.step_s(count, 1) for speed, count in zip(speeds, counts, strict=True)) == best_s
