"""The stream of labelled samples: the same for any number of ranks, each held-out sample once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainspec_cli.balance.batch.division import Division, OwnSamples
from trainspec_cli.engine.data.loader import SampleLoader


class Numbered:
    """Sample `index` tells its index, and what its generator drew."""

    def count(self, split):
        return {"train": 30, "heldout": 11}[split]

    def train(self, index, generator):
        return np.array([index, generator.random()], dtype=np.float32), np.array(index)

    def heldout(self, index):
        return np.array([index, 0], dtype=np.float32), np.array(index)


BATCH = 12


def loader() -> SampleLoader:
    return SampleLoader(Numbered(), seed=5, num_readers=3)


def step_images(step: int, division: Division) -> torch.Tensor:
    """The whole global batch of a step, put together from every rank's micro-batches."""
    owns = [division.of_rank(rank, step * BATCH, BATCH) for rank in range(len(division.weights))]
    ranks = [loader().read(own) for own in owns]
    assert [tuple(len(images) for images, _ in rank) for rank in ranks] == [own.sizes for own in owns]
    assert all(torch.equal(images[:, 0], labels) for rank in ranks for images, labels in rank)
    return torch.cat([rank[turn][0] for turn in range(len(ranks[0])) for rank in ranks])


@pytest.mark.parametrize(
    "division",
    [Division((1.0, 1.0), 1), Division((1.0,) * 5, 2), Division((1.0, 0.001), 4), Division((1.0,) * 13, 3)],
    ids=str,
)
def test_the_stream_is_the_same_however_it_is_divided(division):
    for step in (0, 1, 9):
        assert torch.equal(step_images(step, division), step_images(step, Division((1.0,), BATCH)))


def test_a_rank_without_samples_has_empty_micro_batches():
    parts = loader().read(OwnSamples((40, 44), (0, 0)))
    assert [(tuple(images.shape), tuple(labels.shape)) for images, labels in parts] == [((0, 2), (0,))] * 2


def test_an_epoch_sees_every_sample_once_and_crops_it_anew():
    seen = torch.cat([step_images(step, Division((1.0,) * 5, 2)) for step in range(5)])
    first, second = seen[:30], seen[30:]
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(30))
    assert len(set(seen[:, 1].tolist())) == 60


@pytest.mark.parametrize(("num_ranks", "size"), [(1, 1), (2, 3), (3, 4)])
def test_every_heldout_sample_is_judged_once(num_ranks, size):
    per_rank = [list(loader().heldout_batches(size, rank, num_ranks)) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1, "every rank takes part in equally many forwards"
    judged = [labels[:real] for batches in per_rank for _, labels, real in batches]
    assert sorted(torch.cat(judged).tolist()) == list(range(11))
