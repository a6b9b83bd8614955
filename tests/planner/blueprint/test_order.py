"""Orders of the axes that moving nodes can make, and which ranks then lie together."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from trainspec_cli.planner.blueprint import Extent, groups_in, node_places, orders, usual_order
from trainspec_cli.planner.hardware.cluster import Fabric, NetworkTier, axis_groups
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout

EFF = Efficiency()
LAYOUTS = [
    Layout(tp=8, pp=4, dp_shard=4, dp_replicate=2),
    Layout(tp=2, cp=2, dp_shard=16, pp=4),
    Layout(tp=4, dp_shard=8, dp_replicate=8),
    Layout(tp=2, ep=8, dp_shard=16, dp_replicate=4, pp=2),
    Layout(ep=32, dp_shard=64, dp_replicate=2, pp=2),
]


def fabric(layout: Layout, leaf: int = 32) -> Fabric:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    tiers = NetworkTier("leaf", leaf, 400.0), NetworkTier("spine", layout.world_size, 100.0)
    return Fabric(chip, layout.world_size, 8, 8, 450.0, 400.0, described=tiers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=Layout.describe)
@pytest.mark.parametrize("leaf", [16, 32, 64])
def test_the_usual_order_has_the_usual_groups(layout: Layout, leaf: int) -> None:
    found = fabric(layout, leaf)
    usual = next(orders(layout, 8))
    groups, expected = groups_in(usual, layout, found, EFF), axis_groups(layout, found, EFF)
    for axis in ("tp", "cp", "ep", "dp", "dp_shard", "dp_replicate", "pp"):
        assert groups[axis] == expected[axis], axis
    if layout.ep > 1:
        assert groups["expert_dp"] == expected["expert_dp"]


def test_a_node_keeps_its_ranks() -> None:
    layout = Layout(tp=2, dp_shard=16, dp_replicate=2, pp=2)
    assert usual_order(layout, 8) == (
        Extent("tp", 2), Extent("dp_shard", 4), Extent("dp_shard", 4), Extent("dp_replicate", 2), Extent("pp", 2)
    )  # fmt: skip
    made = list(orders(layout, 8))
    assert len(made) == 6 and {order[:2] for order in made} == {(Extent("tp", 2), Extent("dp_shard", 4))}
    assert usual_order(Layout(tp=3, pp=8), 8) is None
    assert list(orders(Layout(tp=3, pp=8), 8)) == []


def test_experts_keep_the_axes_that_they_are_laid_over_together() -> None:
    layout = Layout(tp=2, ep=8, dp_shard=16, dp_replicate=2, pp=2)
    assert {order[:3] for order in orders(layout, 8)} == {
        (Extent("tp", 2), Extent("dp_shard", 4), Extent("dp_shard", 4))
    }


def coordinates(layout: Layout) -> Iterator[dict[str, int]]:
    """Of every rank by its number: pp outermost, tp innermost."""
    for values in itertools.product(*(range(getattr(layout, axis)) for axis in MESH_AXES)):
        yield dict(zip(MESH_AXES, values, strict=True))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout.ep == 1], ids=Layout.describe)
@pytest.mark.parametrize("leaf", [16, 64])
def test_groups_lie_as_they_do_where_the_nodes_are_placed_so(layout: Layout, leaf: int) -> None:
    """Each rank is put on its node's place; the ranks of a group inside one leaf are counted."""
    usual, ranks = next(orders(layout, 8)), list(coordinates(layout))
    for order in orders(layout, 8):
        places = node_places(usual, order, 8)
        assert sorted(places) == list(range(layout.world_size // 8))
        at = [places[number // 8] * 8 + number % 8 for number in range(len(ranks))]
        groups = groups_in(order, layout, fabric(layout, leaf), EFF)
        for axis in ("dp_shard", "dp_replicate", "pp"):
            beside = [other for other in MESH_AXES if other != axis and (axis, other) != ("dp_shard", "cp")]
            mates = [at[number] // leaf for number, rank in enumerate(ranks)
                     if all(rank[other] == ranks[0][other] for other in beside)]  # fmt: skip
            counted = mates.count(at[0] // leaf)
            group = groups[axis]
            assert counted == (group.outer[0].ranks if group.outer else group.size), (axis, order)


def test_moving_a_pipeline_inside_moves_its_stages_next_to_one_another() -> None:
    """Two stages of four nodes each: node n and n + 4 hold the same samples, and come to lie side by side."""
    usual = (Extent("tp", 8), Extent("dp_shard", 4), Extent("pp", 2))
    inside = (Extent("tp", 8), Extent("pp", 2), Extent("dp_shard", 4))
    assert node_places(usual, inside, 8) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert node_places(usual, usual, 8) == tuple(range(8))
