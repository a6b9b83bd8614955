"""A step's samples over groups, ranks and micro-batches: each of them once, and in the proportions asked for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.balance.batch.division import (
    Division,
    OwnSamples,
    Portion,
    divide,
    even_division,
    largest_that_fits,
    lr_factor,
    micro_batches_of,
    take_portion,
    turns_of,
    waits_in_micro_batches,
    weighted_counts,
)
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import BatchingSpec

KEEP = BatchingSpec(global_batch_size=48)
SHRINK = BatchingSpec(global_batch_size=48, on_loss="shrink")
INTERLEAVED = Layout(pp=4, dp_shard=2, pipeline_schedule="interleaved", virtual_stages=2)

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12)
COUNTS = st.lists(st.integers(0, 30), min_size=1, max_size=9)


# Whole samples in proportion to weights


@pytest.mark.parametrize(
    ("samples", "weights", "counts"),
    [
        (8, (1, 1), (4, 4)),
        (8, (1, 1, 1), (3, 3, 2)),
        (7, (2, 1, 1), (3, 2, 2)),
        (10, (1, 1, 2), (3, 2, 5)),
        (9, (0.5, 1.0), (3, 6)),
        (10, (0.55, 0.26, 0.19), (5, 3, 2)),
        (100, (0.1, 0.2, 0.7), (10, 20, 70)),
        (3, (1, 1, 1, 1), (1, 1, 1, 0)),
        (2, (1, 5, 1, 5), (0, 1, 0, 1)),
        (0, (1, 2), (0, 0)),
    ],
    ids=str,
)
def test_samples_in_proportion_to_weights(samples: int, weights: tuple[float, ...], counts: tuple[int, ...]) -> None:
    """The rest goes to the largest remainders; ties go to the first."""
    assert weighted_counts(samples, weights) == counts


@pytest.mark.parametrize(
    ("samples", "weights", "counts"),
    [
        (8, (1, 0.001), (7, 1)),
        (8, (0.001, 1), (1, 7)),
        (8, (1, 1, 0.001, 0.001), (3, 3, 1, 1)),
        (9, (1, 1, 0.001, 0.001), (4, 3, 1, 1)),
        (5, (100, 1, 1, 1, 1), (1, 1, 1, 1, 1)),
        (12, (6, 3, 0, 0, 0), (6, 3, 1, 1, 1)),
        (11, (6, 3, 0, 0, 0), (5, 3, 1, 1, 1)),
    ],
    ids=str,
)
def test_no_rank_goes_without_where_there_are_samples_enough(
    samples: int, weights: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    """The others share the rest in proportion."""
    assert weighted_counts(samples, weights) == counts


@given(st.integers(0, 500), WEIGHTS)
def test_counts_sum_to_the_samples_and_are_near_their_shares(samples: int, weights: list[float]) -> None:
    counts = weighted_counts(samples, weights)
    shares = [samples * weight / sum(weights) for weight in weights]
    assert sum(counts) == samples
    assert min(counts) >= (samples >= len(weights))
    if min(shares) >= 1 or samples < len(weights):
        assert max(abs(count - share) for count, share in zip(counts, shares, strict=True)) < 1
    assert weighted_counts(samples, [8 * weight for weight in weights]) == counts, "weights are of any unit"


@given(st.integers(0, 500), st.integers(1, 40))
def test_equal_weights_differ_by_one_and_the_first_ones_have_more(samples: int, ranks: int) -> None:
    each, spare = divmod(samples, ranks)
    assert weighted_counts(samples, [0.1] * ranks) == (each + 1,) * spare + (each,) * (ranks - spare)


def test_thousands_of_ranks() -> None:
    weights = [1.0 if rank % 7 else 0.5 for rank in range(4096)]
    counts = weighted_counts(16_384, weights)
    assert sum(counts) == 16_384
    assert {count for count, weight in zip(counts, weights, strict=True) if weight == 0.5} == {2}
    assert {count for count, weight in zip(counts, weights, strict=True) if weight == 1.0} == {4, 5}
    assert weighted_counts(4097, weights).count(1) == 4095, "nobody without, and one has the sample that is left"


# A rank's micro-batches


def positions(own: OwnSamples) -> list[list[int]]:
    return [list(range(start, start + size)) for start, size in zip(own.starts, own.sizes, strict=True)]


def test_micro_batches_of_three_ranks() -> None:
    """Two micro-batches of seven samples; the spare ones of the ranks fall on them by turns."""
    assert divide((3, 3, 1), 2) == (
        OwnSamples((0, 4), (2, 1)),
        OwnSamples((2, 5), (1, 2)),
        OwnSamples((3, 7), (1, 0)),
    )


@given(COUNTS, st.integers(1, 9))
def test_every_sample_is_in_one_micro_batch_of_one_rank(counts: list[int], micro_batches: int) -> None:
    ranks = divide(counts, micro_batches)
    assert [own.samples for own in ranks] == counts
    by_micro_batch = [[position for own in ranks for position in positions(own)[turn]] for turn in range(micro_batches)]
    one_after_another = [position for micro_batch in by_micro_batch for position in micro_batch]
    assert one_after_another == list(range(sum(counts)))
    for own in ranks:
        assert len(own.sizes) == len(own.starts) == micro_batches
        assert max(own.sizes) - min(own.sizes) <= 1
    sizes = [len(micro_batch) for micro_batch in by_micro_batch]
    assert max(sizes) - min(sizes) <= 1


@given(WEIGHTS, st.integers(0, 200), st.integers(1, 9), st.integers(1, 4), st.integers(0, 10**9))
def test_a_divisions_ranks_have_equally_many_micro_batches_in_whole_turns(
    weights: list[float], samples: int, micro_batch_size: int, turns: int, start: int
) -> None:
    division = Division(tuple(weights), micro_batch_size, turns)
    ranks = [division.of_rank(rank, start, samples) for rank in range(len(weights))]
    number = division.count_micro_batches(samples)
    assert {len(own.sizes) for own in ranks} == {number}
    assert number % turns == 0 and number >= turns
    assert max(size for own in ranks for size in own.sizes) <= micro_batch_size
    fewer = number - turns
    assert fewer < turns or fewer * micro_batch_size < max(own.samples for own in ranks), "and not more than it takes"
    everything = sorted(position for own in ranks for part in positions(own) for position in part)
    assert everything == list(range(start, start + samples))
    assert tuple(own.samples for own in ranks) == division.counts(samples) == weighted_counts(samples, weights)


def test_a_division_may_ask_for_more_micro_batches_than_its_samples_take() -> None:
    division = Division((1.0, 1.0), micro_batch_size=4, micro_batches=3)
    assert division.of_rank(0, 0, 4) == OwnSamples((0, 2, 3), (1, 1, 0))
    assert division.of_rank(1, 0, 4) == OwnSamples((1, 3, 3), (1, 0, 1))
    assert division.count_micro_batches(26) == 4, "thirteen samples by fours"


def test_ranks_that_wait_for_one_another_take_their_larger_micro_batches_together() -> None:
    division = Division((19.0, 18.0, 9.0, 18.0), 16, micro_batches=2, in_step=True)
    assert [division.of_rank(rank, 0, 64).sizes for rank in range(4)] == [(10, 9), (9, 9), (5, 4), (9, 9)]
    assert [division.of_rank(rank, 0, 64).starts for rank in range(4)] == [(0, 33), (10, 42), (19, 51), (24, 55)]


@pytest.mark.parametrize(
    ("layout", "waits"),
    [
        (Layout(dp_shard=4, zero_stage=3), True),
        (Layout(dp_shard=4, zero_stage=2), True),
        (Layout(dp_shard=4, zero_stage=1), False),
        (Layout(dp_shard=4, zero_stage=1, ep=4), True),
        (Layout(dp_replicate=4), False),
        (Layout(dp_shard=4, pp=2, zero_stage=3), False),
    ],
)
def test_ranks_wait_in_micro_batches_for_what_they_exchange_there(layout: Layout, waits: bool) -> None:
    assert waits_in_micro_batches(layout) == waits
    assert even_division(layout, 8, keeps_micro_batches=False).in_step == waits
    assert not even_division(layout, 8, keeps_micro_batches=True).in_step


def test_samples_later_in_the_run_are_divided_alike() -> None:
    division = Division((2.0, 1.0), micro_batch_size=2)
    assert division.of_rank(1, 1000, 9) == division.of_rank(1, 0, 9).moved(1000)
    assert division.of_rank(1, 1000, 9) == OwnSamples((1002, 1005, 1008), (1, 1, 1))


def test_a_rank_without_samples_has_empty_micro_batches_at_a_position_of_the_run() -> None:
    division = Division((1.0, 1.0, 1.0), micro_batch_size=2)
    assert division.of_rank(2, 50, 2) == OwnSamples((52,), (0,))
    assert division.of_rank(0, 50, 0) == OwnSamples((50,), (0,))


@pytest.mark.parametrize(
    ("layout", "turns"),
    [(INTERLEAVED, 4), (Layout(pp=4), 1), (Layout(pp=4, pipeline_schedule="zero_bubble"), 1), (Layout(dp_shard=8), 1)],
    ids=str,
)
def test_only_the_interleaved_schedule_takes_turns(layout: Layout, turns: int) -> None:
    assert turns_of(layout) == turns


def test_equally_fast_ranks_have_equal_shares() -> None:
    assert even_division(INTERLEAVED, 3, keeps_micro_batches=False) == Division((1.0, 1.0), 3, turns=4, bubble=1.5)
    assert even_division(
        Layout(dp_replicate=2, dp_shard=3, tp=2, zero_stage=1), 1, keeps_micro_batches=False
    ) == Division((1.0,) * 6, 1)


# A replica group's portion


def portions_of(batching: BatchingSpec, weights: tuple[float, ...], groups: int, start: int = 0) -> list[Portion]:
    samples = batching.global_batch_size
    return [take_portion(batching, samples, weights, groups, start, rank) for rank in range(len(weights))]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (3.0, 1.0, 1.0), (0.1, 0.2, 0.3, 0.4)], ids=str)
@pytest.mark.parametrize("batching", [KEEP, SHRINK, BatchingSpec(7), BatchingSpec(3, on_loss="shrink")], ids=str)
def test_portions_lie_side_by_side(batching: BatchingSpec, weights: tuple[float, ...]) -> None:
    portions = portions_of(batching, weights, groups=4, start=1000)
    ends = [1000] + [portion.start + portion.samples for portion in portions]
    assert [portion.start for portion in portions] == ends[:-1]
    assert {portion.step_samples for portion in portions} == {ends[-1] - 1000}


def test_a_kept_batch_is_divided_among_those_that_are_left() -> None:
    assert [portion.samples for portion in portions_of(KEEP, (1, 1, 1), groups=4)] == [16, 16, 16]
    assert [portion.samples for portion in portions_of(BatchingSpec(16), (1, 1, 1), groups=4)] == [6, 5, 5]
    assert [portion.samples for portion in portions_of(KEEP, (2, 1, 1), groups=4)] == [24, 12, 12]


def test_a_shrunken_batch_lacks_what_the_missing_group_would_have_taken() -> None:
    portions = portions_of(SHRINK, (1, 1, 1), groups=4)
    assert [portion.samples for portion in portions] == [12, 12, 12]
    assert portions[0].step_samples == 36
    weighted = portions_of(SHRINK, (1, 2), groups=4)
    assert [(portion.start, portion.samples, portion.step_samples) for portion in weighted] == [(0, 8, 24), (8, 16, 24)]


@pytest.mark.parametrize(
    ("samples", "present", "kept"),
    [(7, 4, 7), (7, 3, 5), (7, 1, 1), (5, 3, 3), (4, 3, 3), (2, 4, 2), (2, 3, 2), (2, 1, 1), (1, 4, 1)],
)
def test_a_shrunken_batch_keeps_a_sample_a_group_and_never_grows(samples: int, present: int, kept: int) -> None:
    portions = portions_of(BatchingSpec(samples, on_loss="shrink"), (1.0,) * present, groups=4)
    assert {portion.step_samples for portion in portions} == {kept}
    assert sum(portion.samples for portion in portions) == kept


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_the_learning_rate_follows_a_smaller_batch(rule, factor: float) -> None:
    assert lr_factor(rule, 12, 48) == factor
    assert lr_factor(rule, 48, 48) == 1.0


# Micro-batches of a layout


@pytest.mark.parametrize(("most_that_fits", "found"), [(0, 4), (4, 4), (5, 5), (7, 7), (8, 8), (100, 8)])
def test_the_largest_micro_batch_that_fits_is_between_the_usual_one_and_the_most(
    most_that_fits: int, found: int
) -> None:
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most_that_fits

    assert largest_that_fits(4, 8, fits) == found
    assert min(tried) > 4 and max(tried) <= 8 and len(tried) <= 3
    assert largest_that_fits(4, 4, lambda size: True) == 4


@pytest.mark.parametrize(
    ("layout", "micro_batch_size", "samples", "micro_batches"),
    [
        (Layout(dp_shard=4), 2, 32, 4),
        (Layout(dp_shard=4), 2, 33, 5),  # 9 samples for the fullest rank
        (Layout(dp_replicate=2, dp_shard=4), 2, 32, 2),
        (Layout(dp_shard=4, tp=2), 2, 32, 4),
        (Layout(dp_shard=4), 2, 3, 1),
        (INTERLEAVED, 2, 20, 8),  # 5 micro-batches of two, in turns of 4
    ],
    ids=str,
)
def test_micro_batches_of_equally_fast_ranks(
    layout: Layout, micro_batch_size: int, samples: int, micro_batches: int
) -> None:
    assert micro_batches_of(layout, micro_batch_size, samples) == micro_batches
