"""The stream of labelled samples: the same for any number of ranks, each held-out sample once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trainspec_cli.engine.data.loader import BatchPlan
from trainspec_cli.engine.data.sample_loader import SampleLoader


class Numbered:
    """Sample `index` tells its index, and what its generator drew."""

    def count(self, split):
        return {"train": 30, "heldout": 11}[split]

    def train(self, index, generator):
        return np.array([index, generator.random()], dtype=np.float32), np.array(index)

    def heldout(self, index):
        return np.array([index, 0], dtype=np.float32), np.array(index)


def loader(rank: int = 0, num_ranks: int = 1, micro: int = 1) -> SampleLoader:
    return SampleLoader(Numbered(), BatchPlan(12, micro, seed=5, rank=rank, num_ranks=num_ranks), num_readers=3)


def step_images(num_ranks: int, step: int, micro: int = 1) -> torch.Tensor:
    parts = [loader(rank, num_ranks, micro).read_step(step) for rank in range(num_ranks)]
    assert all(len(images) == micro for rank in parts for images, _ in rank)
    return torch.cat([images for rank in parts for images, _ in rank])


@pytest.mark.parametrize(("num_ranks", "micro"), [(2, 1), (3, 2), (4, 3)])
def test_the_stream_is_the_same_for_any_number_of_ranks(num_ranks, micro):
    for step in (0, 1, 9):
        assert torch.equal(step_images(num_ranks, step, micro), step_images(1, step))


def test_an_epoch_sees_every_sample_once_and_crops_it_anew():
    seen = torch.cat([step_images(1, step) for step in range(5)])
    first, second = seen[:30], seen[30:]
    assert sorted(first[:, 0].tolist()) == sorted(second[:, 0].tolist()) == list(range(30))
    assert len(set(seen[:, 1].tolist())) == 60


@pytest.mark.parametrize(("num_ranks", "micro"), [(1, 1), (2, 3), (3, 4)])
def test_every_heldout_sample_is_judged_once(num_ranks, micro):
    per_rank = [list(loader(rank, num_ranks, micro).heldout_batches()) for rank in range(num_ranks)]
    assert len({len(batches) for batches in per_rank}) == 1, "every rank takes part in equally many forwards"
    judged = [labels[:real] for batches in per_rank for _, labels, real in batches]
    assert sorted(torch.cat(judged).tolist()) == list(range(11))
