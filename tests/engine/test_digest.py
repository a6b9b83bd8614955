"""Which replica group's parameters differ."""

import pytest
import torch
from torch import nn

from trainspec_cli.engine.digest import diverging_groups, local_digest
from trainspec_cli.engine.shares import Share


@pytest.mark.parametrize(
    ("digests", "diverging"),
    [
        ([5, 5, 5], []),
        ([5, 7, 5], [1]),
        ([5, 7], [0, 1]),
        ([5, 7, 8, 5], [1, 2]),
        ([5, 5, 7, 7], [0, 1, 2, 3]),
        ([], []),
    ],
)
def test_the_minority_diverges(digests: list[int], diverging: list[int]) -> None:
    assert diverging_groups([torch.tensor([value]) for value in digests]) == diverging


@pytest.mark.parametrize("bit", [0, 22, 23, 30, 31])
def test_any_one_bit_changes_the_digest(bit: int) -> None:
    share = Share("weight", nn.Parameter(torch.randn(16, 8)))
    before = int(local_digest([share]))
    words = share.local.detach().view(torch.int32).flatten()
    words[77] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert int(local_digest([share])) != before
