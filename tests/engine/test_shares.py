"""Where a rank's part lies in the whole parameter."""

from __future__ import annotations

import torch

from trainspec_cli.engine.shares import Cut, Share, unique_shares


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
