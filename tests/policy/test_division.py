"""Every sample of a step is taken by exactly one of the groups that are there."""

import pytest
from trainspec_cli.policy.spread import lr_factor, take_portion

from trainspec_cli.spec.recipe.batching import BatchingSpec

KEEP = BatchingSpec(global_batch_size=48)
SHRINK = BatchingSpec(global_batch_size=48, on_loss="shrink")


@pytest.mark.parametrize("participants", [1, 2, 3, 4])
@pytest.mark.parametrize("batching", [KEEP, SHRINK])
def test_portions_lie_side_by_side(batching: BatchingSpec, participants: int) -> None:
    portions = [take_portion(batching, 4, 4, 1000, rank, participants) for rank in range(participants)]
    ends = [1000] + [portion.start + portion.samples for portion in portions]
    assert [portion.start for portion in portions] == ends[:-1]
    assert {portion.step_samples for portion in portions} == {ends[-1] - 1000}


def test_a_kept_batch_is_spread_over_those_that_are_left() -> None:
    portions = [take_portion(KEEP, 4, 4, 0, rank, participants=3) for rank in range(3)]
    assert [portion.samples for portion in portions] == [16, 16, 16]
    uneven = [take_portion(BatchingSpec(global_batch_size=16), 4, 4, 0, rank, participants=3) for rank in range(3)]
    assert [portion.samples for portion in uneven] == [8, 4, 4]


def test_a_shrunken_batch_lacks_what_the_missing_group_would_have_taken() -> None:
    portions = [take_portion(SHRINK, 4, 4, 0, rank, participants=3) for rank in range(3)]
    assert [portion.samples for portion in portions] == [12, 12, 12]
    assert portions[0].step_samples == 36


@pytest.mark.parametrize(("rule", "factor"), [("linear", 0.25), ("sqrt", 0.5), ("none", 1.0)])
def test_the_learning_rate_follows_a_smaller_batch(rule, factor: float) -> None:
    assert lr_factor(rule, 12, 48) == factor
    assert lr_factor(rule, 48, 48) == 1.0
