"""Which ranks work together, against the order of the axes written out as an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from trainspec_cli.engine.mesh import build_mesh, split_by_tier
from trainspec_cli.engine.tools.trace import fake_world
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout

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


def test_every_rank_knows_the_links_of_all() -> None:
    with fake_world(0, WORLD):
        links = build_mesh(Layout(**SIZES), "cpu").links()
    axes = {"dp_replicate": (REPLICATE,), "dp_shard": (SHARD, CP), "cp": (CP,), "tp": (TP,)}
    assert set(links) == set(axes)
    for axis, along in axes.items():
        assert sorted(rank for ranks in links[axis] for rank in ranks) == list(range(WORLD))
        assert all(list(ranks) == peers_of(ranks[0], *along) for ranks in links[axis])


def test_experts_have_links_of_their_own() -> None:
    with fake_world(0, 8):
        links = build_mesh(Layout(dp_shard=4, tp=2, ep=4), "cpu").links()
    assert links["ep"] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert links["expert_shard"] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert "cp" not in links, "an axis of one rank has none"


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
    """With zbv, both are on one rank."""
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


@pytest.mark.parametrize(
    ("rows", "sizes", "levels"),
    [
        ([(0, 1, 2, 3)], (2, 4), [[[0, 1], [2, 3]], [[0, 2], [1, 3]]]),
        (
            [(0, 2, 4, 6), (1, 3, 5, 7)],
            (4,),
            [[[0, 2], [4, 6], [1, 3], [5, 7]], [[0, 4], [2, 6], [1, 5], [3, 7]]],
        ),
        ([(0, 1, 2, 3, 4, 5)], (3, 6), [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]]]),
        ([(0, 2, 4, 6)], (2, 4, 8), [[[0, 2], [4, 6]], [[0, 4], [2, 6]]]),
        (
            [tuple(range(8))],
            (2, 4, 8),
            [
                [[0, 1], [2, 3], [4, 5], [6, 7]],
                [[0, 2], [4, 6], [1, 3], [5, 7]],
                [[0, 4], [2, 6], [1, 5], [3, 7]],
            ],
        ),
    ],
    ids=["two nodes", "two rows", "three a node", "one a node, two a leaf", "three tiers"],
)
def test_groups_are_split_by_tier(rows: Any, sizes: Any, levels: Any) -> None:
    assert split_by_tier(rows, lambda rank: rank, sizes) == levels


def test_groups_are_split_by_where_their_nodes_lie() -> None:
    """Nodes of one rank; the first and the third share a switch."""
    places = (0, 2, 1, 3)
    assert split_by_tier([(0, 1, 2, 3)], places.__getitem__, (1, 2)) == [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [([(0, 1)], (2,)), ([(0, 2, 4)], (2,)), ([(0, 1, 2)], (2,)), ([(0, 1), (2, 5)], (3,)), ([(0, 1)], ())],
)
def test_groups_in_one_element_or_uneven_in_several_are_not_split(rows: Any, sizes: Any) -> None:
    assert split_by_tier(rows, lambda rank: rank, sizes) is None
