"""Where a rank's part lies in the whole parameter."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine import shares
from trainspec_cli.engine.digest import held_part
from trainspec_cli.engine.shares import Cut, Share, gather_cut, unique_shares


def cut(index: int, count: int, full_size: int, dim: int = 0) -> Cut:
    return Cut(dim, full_size, index, count, group=None)  # type: ignore[arg-type]


def test_parts_follow_one_another_and_the_last_may_be_smaller():
    parts = [cut(index, 4, 10) for index in range(4)]
    assert [(part.start, part.size) for part in parts] == [(0, 3), (3, 3), (6, 3), (9, 1)]


def test_a_part_of_the_whole_is_what_the_cut_says():
    full = torch.arange(24).view(4, 6)
    share = Share("w", torch.nn.Parameter(torch.empty(4, 3)), cut(1, 2, 6, dim=1))
    assert share.full_shape == (4, 6)
    assert share.offsets == (0, 3)
    assert torch.equal(share.part_of(full), full[:, 3:])


def test_the_optimizer_updates_the_same_memory():
    parameter = torch.nn.Parameter(torch.zeros(3))
    share = Share("w", parameter)
    with torch.no_grad():
        share.local.add_(1.0)
    assert torch.equal(parameter, torch.ones(3))


def test_a_name_that_stands_twice_counts_once():
    first, second = (Share("embed.weight", torch.nn.Parameter(torch.zeros(2))) for _ in range(2))
    other = Share("norm.weight", torch.nn.Parameter(torch.zeros(2)))
    assert [share.name for share in unique_shares([first, other, second])] == ["embed.weight", "norm.weight"]


@pytest.mark.parametrize(("dim", "count", "full"), [(0, 3, 7), (1, 2, 5), (0, 4, 9), (1, 1, 3)])
def test_parts_are_put_together_to_the_whole(monkeypatch, dim, count, full):
    """Every rank pads its part to the largest, and what was padded is left out."""
    whole = torch.arange(float(full * 6)).view((full, 6) if dim == 0 else (6, full))
    cuts = [cut(index, count, full, dim) for index in range(count)]
    parts = [whole.narrow(dim, one.start, one.size) for one in cuts]
    sent = []

    def all_gather(gathered, padded, group):
        sent.append(padded)
        if len(sent) > count:
            for target, source in zip(gathered, sent[:count], strict=True):
                target.copy_(source)

    monkeypatch.setattr(shares.dist, "all_gather", all_gather)
    for one, part in zip(cuts, parts, strict=True):
        gather_cut(part, one)
    assert len({padded.shape for padded in sent}) == 1
    for one, part in zip(cuts, parts, strict=True):
        found = gather_cut(part, one)
        assert torch.equal(found, whole) and found.is_contiguous()
        share = Share("w", torch.nn.Parameter(part.clone()), one)
        assert torch.equal(share.gather(), whole)
        assert torch.equal(share.gather(part), whole)


def test_without_a_cut_the_part_is_the_whole():
    share = Share("w", torch.nn.Parameter(torch.ones(2, 3)))
    assert (share.full_shape, share.offsets) == ((2, 3), (0, 0))
    assert torch.equal(share.gather(), torch.ones(2, 3))
    assert share.gradient is None
    share.parameter.grad = torch.full((2, 3), 2.0)
    assert torch.equal(share.gradient, torch.full((2, 3), 2.0))
    assert share.is_trained
    share.parameter.requires_grad_(False)
    assert not share.is_trained


def test_an_empty_part_is_an_empty_view():
    full = torch.arange(12).view(3, 4)
    last = cut(3, 4, 3)
    assert (last.start, last.size) == (3, 0)
    assert Share("w", torch.nn.Parameter(torch.empty(0, 4)), last).part_of(full).shape == (0, 4)


def test_a_rank_holds_its_positions_of_each_sequence():
    tokens, targets = torch.arange(12).view(2, 6), torch.arange(12).view(2, 6) + 1
    assert held_part((tokens, targets), None) == (tokens, targets)
    held = held_part((tokens, targets), torch.tensor([1, 4]))
    assert [part.tolist() for part in held] == [[[1, 4], [7, 10]], [[2, 5], [8, 11]]]
