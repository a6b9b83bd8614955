"""The order of samples: it depends only on seed and epoch, is shared among ranks, and can continue at any batch."""

from __future__ import annotations

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.wings.own_script.attachment.shares import ShardedBatches


def batches(rank: int = 0, ranks: int = 1, *, seed: int = 5, epoch: int = 0, first: int = 0) -> list[list[int]]:
    made = ShardedBatches(50, 8, rank=rank, ranks=ranks, seed=seed, shuffle=True)
    made.epoch, made.first = epoch, first
    return list(made)


def test_an_epoch_takes_each_sample_once_in_its_own_order() -> None:
    taken = [sample for batch in batches() for sample in batch]
    assert len(taken) == len(set(taken)) == 48
    assert batches() == batches() != batches(epoch=1) != batches(seed=6)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_ranks_share_each_step_in_order(ranks: int) -> None:
    parts = [batches(rank, ranks) for rank in range(ranks)]
    assert [[sample for part in step for sample in part] for step in zip(*parts, strict=True)] == batches()


def test_uneven_parts_take_the_same_samples_in_the_same_order() -> None:
    counts = (5, 1, 2)
    parts = []
    for rank in range(3):
        made = ShardedBatches(50, 8, rank=rank, ranks=3, seed=5, shuffle=True, counts=counts)
        parts.append(list(made))
        assert {len(part) for part in parts[-1]} == {counts[rank]}
    assert [[sample for part in step for sample in part] for step in zip(*parts, strict=True)] == batches()


def test_the_first_batch_applies_to_one_iteration() -> None:
    made = ShardedBatches(50, 8, rank=1, ranks=2, seed=5, shuffle=True)
    made.first = 4
    assert (list(made), len(list(made)), len(made)) == (batches(1, 2)[4:], 6, 6)


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    made = ShardedBatches(5, 2, rank=0, ranks=1, seed=0, shuffle=False)
    assert list(made) == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("samples", "batch_size", "ranks", "code"), [(50, 8, 3, "not_divisible"), (5, 8, 2, "too_large")]
)
def test_an_impossible_batch_size_is_refused(samples: int, batch_size: int, ranks: int, code: str) -> None:
    with pytest.raises(RecipeError) as error:
        ShardedBatches(samples, batch_size, rank=0, ranks=ranks, seed=0, shuffle=True)
    assert error.value.problems[0].code == code
