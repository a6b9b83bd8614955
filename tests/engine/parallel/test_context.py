"""Which positions a rank holds, so that each weighs the same."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine.parallel.context import held_positions


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_position_is_held_once(method, size):
    held = torch.cat([held_positions(32, method, rank, size) for rank in range(size)])
    assert torch.equal(held.sort().values, torch.arange(32))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_zigzag_gives_every_rank_as_much_of_the_causal_half(size):
    work = [int((held_positions(64, "ring", rank, size) + 1).sum()) for rank in range(size)]
    assert len(set(work)) == 1
