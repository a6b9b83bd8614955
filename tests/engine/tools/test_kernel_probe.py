"""Which ranks' shapes the processes of one host take."""

from __future__ import annotations

import pytest

from trainspec_cli.engine.tools.kernels import stand_in


@pytest.mark.parametrize(("processes", "world_size"), [(1, 1), (2, 2), (8, 8), (8, 64), (8, 17), (2, 3)])
def test_the_first_and_the_last_rank_are_among_them(processes: int, world_size: int) -> None:
    ranks = [stand_in(rank, processes, world_size) for rank in range(processes)]
    assert ranks[0] == 0
    assert ranks[-1] == world_size - 1
    assert len(set(ranks)) == processes


def test_a_host_with_the_whole_run_takes_each_its_own() -> None:
    assert [stand_in(rank, 4, 4) for rank in range(4)] == [0, 1, 2, 3]
