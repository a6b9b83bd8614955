"""Which ranks work together, against the order of the axes written out as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from trainspec_cli.engine.mesh import build_mesh
from trainspec_cli.engine.tools.trace import fake_world
from trainspec_cli.spec.recipe.layout import MESH_AXES, Layout

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}
WORLD = 48
RANKS = np.arange(WORLD).reshape(tuple(SIZES[axis] for axis in MESH_AXES))
PP, REPLICATE, SHARD, CP, TP = range(5)


def peers_of(rank: int, *axes: int) -> list[int]:
    """The ranks that differ from `rank` in these axes alone."""
    index: list[Any] = [int(places[0]) for places in np.nonzero(rank == RANKS)]
    for axis in axes:
        index[axis] = slice(None)
    return RANKS[tuple(index)].ravel().tolist()


def ranks_of(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


@pytest.mark.parametrize("rank", [0, 5, 13, 22, 47])
def test_groups_are_those_of_the_axes(rank: int) -> None:
    with fake_world(rank, WORLD):
        mesh = build_mesh(Layout(**SIZES), "cpu")
        for axis, name in enumerate(MESH_AXES):
            assert ranks_of(mesh.group(name)) == peers_of(rank, axis), name
        assert ranks_of(mesh.shard.get_group()) == peers_of(rank, SHARD, CP)
        assert ranks_of(mesh.stage.get_group()) == peers_of(rank, REPLICATE, SHARD, CP, TP)
        assert ranks_of(mesh.upstream) == ranks_of(mesh.ends) == peers_of(rank, PP)
        assert mesh.upstream is not mesh.group("pp")


def test_data_ranks_count_over_both_data_axes_and_no_other() -> None:
    found = {}
    for rank in range(0, WORLD, 3):
        with fake_world(rank, WORLD):
            found[rank] = build_mesh(Layout(**SIZES), "cpu").data_rank
    places = {rank: np.argwhere(rank == RANKS)[0] for rank in range(0, WORLD, 3)}
    assert found == {rank: 3 * place[REPLICATE] + place[SHARD] for rank, place in places.items()}


@pytest.mark.parametrize(
    ("layout", "first_and_last"),
    [
        (Layout(pp=4, tp=2), {0: [0, 6], 7: [1, 7]}),
        (Layout(pp=4, tp=2, pipeline_schedule="interleaved", virtual_stages=2), {1: [1, 7], 6: [0, 6]}),
        (Layout(pp=4, tp=2, pipeline_schedule="zbv", virtual_stages=2), {0: [0], 1: [1]}),
    ],
    ids=["1f1b", "interleaved", "zbv"],
)
def test_the_ends_of_a_pipeline_are_where_its_first_and_last_stage_stand(
    layout: Layout, first_and_last: dict[int, list[int]]
) -> None:
    """Of zbv both stand on one rank."""
    for rank, wanted in first_and_last.items():
        with fake_world(rank, 8):
            assert ranks_of(build_mesh(layout, "cpu").ends) == wanted


@pytest.mark.parametrize("rank", [0, 3, 6])
def test_experts_are_spread_over_neighbours_and_sharded_over_the_rest(rank: int) -> None:
    with fake_world(rank, 8):
        mesh = build_mesh(Layout(dp_shard=8, ep=2), "cpu")
        assert ranks_of(mesh.expert_group("ep")) == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert ranks_of(mesh.expert_group("expert_shard")) == list(range(rank % 2, 8, 2))


def test_without_spread_experts_there_is_no_mesh_of_theirs() -> None:
    with fake_world(0, 2):
        assert build_mesh(Layout(dp_shard=2), "cpu").experts is None
