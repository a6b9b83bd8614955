"""The blueprint of a layout: the order of its axes, its exchanges, and what goes into the environment."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from trainspec_cli.planner.blueprint import (
    Extent,
    best_bucket_bytes,
    draw_blueprint,
    groups_in,
    levels_of,
    node_places,
    orders,
    times_of,
    tree_until_bytes,
    usual_order,
)
from trainspec_cli.planner.hardware.cluster import Crossing, Fabric, Group, NetworkTier, axis_groups, with_tiers
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import assemble_step, estimate_step, micro_batch
from trainspec_cli.recipe.keys.cluster import FabricSpec, TierSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.blueprint import Blueprint

# The blueprint of a layout: the order of its axes, its exchanges, and what goes into the environment


EFF = Efficiency()
MODEL = DecoderModel(32, 4096, 32, 8, 128, 14336, 128256)
WIDE = Layout(tp=8, pp=4, dp_shard=8, zero_stage=1)


def draw(layout: Layout, *tiers: TierSpec, **spec: object) -> tuple[Setup, Blueprint]:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    fabric = with_tiers(Fabric(chip, layout.world_size, 8, 8, 450.0, 400.0), tiers)
    setup = Setup(MODEL, layout, fabric, seq_len=8192, micro_batch_size=1.0, grad_accum=16)
    return setup, draw_blueprint(setup, FabricSpec(tiers=tiers, **spec), EFF)  # type: ignore[arg-type]


def by_axis(blueprint: Blueprint) -> dict[tuple[str, str], str]:
    return {(one.axis, one.operation): one.tier for one in blueprint.exchanges}


def test_each_exchange_knows_the_widest_tier_that_it_crosses() -> None:
    tiers = TierSpec("nvlink"), TierSpec("leaf", 64), TierSpec("spine")
    _, blueprint = draw(WIDE, *tiers)
    assert by_axis(blueprint) == {
        ("tp", "all_reduce"): "scale-up domain",
        ("pp", "send"): "spine",
        ("dp", "reduce_scatter"): "leaf",
        ("dp", "all_gather"): "leaf",
    }
    assert [(tier.name, tier.elements, tier.devices) for tier in blueprint.tiers] == [
        ("scale-up domain", 32, 8), ("leaf", 4, 64), ("spine", 1, 256),
    ]  # fmt: skip


def test_how_often_and_how_much_follows_from_the_layout() -> None:
    setup, blueprint = draw(WIDE)
    found = {(one.axis, one.operation): one for one in blueprint.exchanges}
    tp = found["tp", "all_reduce"]
    assert tp.per_step == 16 * 2 * 2 * MODEL.num_layers / 4
    assert tp.message_bytes == 2 * 8192 * MODEL.hidden_size
    pp = found["pp", "send"]
    assert (pp.per_step, pp.message_bytes) == (2 * 16, 2 * 8192 * MODEL.hidden_size / 8)
    reduced = found["dp", "reduce_scatter"]
    gathered = found["dp", "all_gather"]
    assert reduced.bucket_bytes == reduced.message_bytes
    weights = gathered.message_bytes * gathered.per_step
    assert reduced.message_bytes * reduced.per_step == pytest.approx(weights * setup.software.reduce_bytes / 2)


def test_parameters_are_those_of_the_pipeline_rank_that_has_most() -> None:
    def gathered_bytes(*stage_layers: int) -> float:
        layout = Layout(tp=8, pp=2, dp_shard=4, zero_stage=1, stage_layers=stage_layers)
        found = {one.operation: one for one in draw(layout)[1].exchanges if one.axis == "dp"}
        return found["all_gather"].message_bytes * found["all_gather"].per_step

    assert gathered_bytes(28, 4) > 1.5 * gathered_bytes(16, 16)
    assert gathered_bytes(4, 28) == pytest.approx(gathered_bytes(28, 4), rel=0.01)


@pytest.mark.parametrize("layout", [Layout(dp_shard=64), Layout(dp_shard=8, dp_replicate=8), Layout(dp_replicate=64)])
def test_the_exchanges_of_parameters_follow_the_sharding(layout: Layout) -> None:
    found = set(by_axis(draw(layout)[1]))
    gathers = {("dp_shard", "all_gather"), ("dp_shard", "reduce_scatter")}
    across = {("dp_replicate", "all_reduce")} if layout.dp_replicate > 1 else set()
    assert found == ({("dp", "all_reduce")} if layout.dp_shard == 1 else gathers | across)


def test_without_a_better_order_no_node_is_moved_and_the_step_is_the_planned_one() -> None:
    setup, blueprint = draw(WIDE)
    assert (blueprint.node_places, blueprint.order, blueprint.sorts_nodes) == ((), ("pp", "dp_shard", "tp"), False)
    assert blueprint.step_s == blueprint.unplaced_step_s == estimate_step(setup, EFF).total_s
    assert (blueprint.fabric, blueprint.settings) == ("flat", ())


def test_stages_are_moved_to_the_side_of_the_line_that_they_send_over() -> None:
    """Between two sites of 64 devices: replicas would cross the line once a step, stages with every micro-batch."""
    tiers = TierSpec("nvlink"), TierSpec("site", 64), TierSpec("line", gbit_per_s=1, latency_us=1000)
    layout = Layout(tp=8, pp=2, dp_shard=8, zero_stage=1)
    many = replace(draw(layout, *tiers)[0], grad_accum=4096)
    blueprint = draw_blueprint(many, FabricSpec(tiers=tiers), EFF)
    assert blueprint.order == ("dp_shard", "pp", "tp")
    assert blueprint.step_s < blueprint.unplaced_step_s
    assert blueprint.node_places[8] == 1, "the second stage of node 0's pipeline stands beside it"
    assert by_axis(blueprint)["pp", "send"] == "site"


@pytest.mark.parametrize("seed", range(20))
def test_on_random_fabrics_the_order_is_the_best_of_all_and_no_exchange_is_worse_than_a_flat_ring(seed: int) -> None:
    chance = random.Random(seed)
    leaf = 16 * 2 ** chance.randrange(3)
    tiers = (
        TierSpec("nvlink"),
        TierSpec("leaf", leaf, gbit_per_s=chance.choice([100, 400])),
        TierSpec("spine", oversubscription=chance.choice([1, 4, 32, 256]), latency_us=10 ** chance.uniform(0, 3)),
    )
    layout = chance.choice(
        [
            Layout(tp=8, pp=4, dp_shard=4, dp_replicate=2, zero_stage=3),
            Layout(tp=4, pp=8, dp_shard=8, zero_stage=1),
            Layout(tp=2, pp=2, dp_shard=8, dp_replicate=8),
        ]
    )
    setup, blueprint = draw(layout, *tiers)
    tried = []
    for order in orders(layout, 8):
        groups = groups_in(order, layout, setup.fabric, EFF)
        tried.append(assemble_step(setup, micro_batch(setup, groups, EFF), groups, EFF).total_s)
    assert blueprint.step_s <= min(tried) * 1.001
    assert blueprint.step_s <= tried[0] == blueprint.unplaced_step_s
    assert all(one.time_s <= one.ring_s for one in blueprint.exchanges)


@pytest.mark.parametrize(("wiring", "value"), [("rails", "0"), ("one_switch", "1")])
def test_only_what_the_documentation_ties_to_the_wiring_is_set(wiring: str, value: str) -> None:
    _, blueprint = draw(WIDE, nic_wiring=wiring)
    [setting] = blueprint.settings
    assert (setting.name, setting.value) == ("NCCL_CROSS_NIC", value)
    assert "NCCL user guide" in setting.source and setting.reason
    assert draw(Layout(tp=8), nic_wiring=wiring)[1].settings == (), "one node"


def test_other_makers_get_no_setting_of_nccl() -> None:
    setup, _ = draw(WIDE)
    other = replace(setup, fabric=replace(setup.fabric, chip=replace(setup.fabric.chip, vendor="amd")))
    blueprint = draw_blueprint(other, FabricSpec(nic_wiring="rails"), EFF)
    assert (blueprint.settings, blueprint.tuner) == ((), ())


def test_the_tuners_table_ends_with_rows_for_all_else() -> None:
    _, blueprint = draw(Layout(tp=8, dp_replicate=32))
    first, *others = blueprint.tuner
    assert (first.collective, first.algorithm, first.nodes, first.ranks, first.min_bytes) == (
        *("allreduce", "tree", 32, 32),
        0,
    )
    assert [(row.collective, row.algorithm, row.nodes) for row in others] == [
        (name, "ring", -1) for name in ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
    ]
    assert draw(WIDE)[1].tuner == (), "no all-reduce crosses nodes: the table would say what the plugin does anyway"


def test_a_tree_gives_way_to_the_ring_where_its_bandwidth_counts() -> None:
    group = Group(256, 8, 3e11, 3e10)
    limit = tree_until_bytes(group, EFF)
    assert 2**20 < limit < 2**31
    assert tree_until_bytes(Group(2, 1, 3e11, 3e10), EFF) == 0


@pytest.mark.parametrize(
    ("layout", "spine_gbit_per_s", "in_tiers"),
    [
        (Layout(dp_replicate=32), None, False),
        (Layout(dp_replicate=32), 10.0, True),
        (Layout(dp_replicate=4, dp_shard=8), 10.0, False),
        (Layout(dp_shard=32), 10.0, False),
    ],
    ids=["fast between nodes", "slow between nodes", "one replica a node", "no replicas"],
)
def test_gradients_of_replicas_are_summed_in_tiers_where_that_is_faster_than_a_ring(
    layout: Layout, spine_gbit_per_s: float | None, in_tiers: bool
) -> None:
    _, blueprint = draw(layout, TierSpec("domain"), TierSpec("spine", gbit_per_s=spine_gbit_per_s))
    assert blueprint.sums_replicas_in_tiers == in_tiers
    of_tensors = replace(blueprint, exchanges=tuple(replace(one, axis="tp") for one in blueprint.exchanges))
    assert not of_tensors.sums_replicas_in_tiers


# Time of an exchange by each algorithm


ALGORITHMS_EFF = replace(Efficiency(), collective_latency_s=0.0, hop_latency_s=0.0)
NODES = Group(32, 8, 100.0, 10.0)


def test_a_hierarchy_takes_the_published_time() -> None:
    """2 (g-1)/g S/B_in + 2 (n-1)/n S/(g B_rail), g = 8 in a node, n = 4 nodes."""
    expected = 2 * 7 / 8 * 800 / 100 + 2 * 3 / 4 * 800 / (8 * 10)
    assert times_of(NODES, "all_reduce", 800.0, ALGORITHMS_EFF)["hierarchical"] == pytest.approx(expected)
    assert times_of(NODES, "all_gather", 800.0, ALGORITHMS_EFF)["hierarchical"] == pytest.approx(expected / 2)


def test_a_flat_ring_takes_the_narrowest_tier_and_waits_for_its_longest_hop_at_every_step() -> None:
    assert times_of(NODES, "all_reduce", 800.0, ALGORITHMS_EFF)["ring"] == pytest.approx(2 * 31 / 32 * 800 / 80)
    slow = replace(NODES, link_latency_s=1.0, nic_latency_s=3.0)
    assert times_of(slow, "all_reduce", 0.0, ALGORITHMS_EFF)["ring"] == 2 * 31 * 3
    assert times_of(slow, "reduce_scatter", 0.0, ALGORITHMS_EFF)["ring"] == 31 * 3
    assert times_of(slow, "all_reduce", 0.0, ALGORITHMS_EFF)["hierarchical"] == 2 * (7 * 1 + 3 * 3)


def test_a_tree_has_the_latency_of_its_depth() -> None:
    slow = replace(NODES, link_latency_s=1.0, nic_latency_s=3.0)
    assert times_of(slow, "all_reduce", 0.0, ALGORITHMS_EFF)["tree"] == 2 * (7 * 1 + math.log2(4) * 3)
    alone = Group(64, 1, 1.0, 1.0, nic_latency_s=3.0)
    assert times_of(alone, "all_reduce", 0.0, ALGORITHMS_EFF)["tree"] == 2 * math.log2(64) * 3
    assert times_of(NODES, "all_reduce", 800.0, ALGORITHMS_EFF)["tree"] == pytest.approx(2 * 800 / 80 / 0.92)


def test_three_tiers_are_three_rings() -> None:
    group = Group(64, 4, 100.0, 10.0, (Crossing(16, 1.0),))
    assert [(level.joined, level.below, level.bytes_per_s) for level in levels_of(group, ALGORITHMS_EFF)] == [
        (4, 1, 100.0), (4, 4, 10.0), (4, 16, 1.0),
    ]  # fmt: skip
    expected = 2 * 3 / 4 * (640 / 100 + 640 / 4 / 10 + 640 / 16 / 1)
    assert times_of(group, "all_reduce", 640.0, ALGORITHMS_EFF)["hierarchical"] == pytest.approx(expected)


def test_one_tier_has_no_hierarchy_and_only_an_all_reduce_a_tree() -> None:
    assert set(times_of(Group(8, 8, 1.0, 1.0), "all_reduce", 8.0, ALGORITHMS_EFF)) == {"ring", "tree"}
    assert set(times_of(NODES, "all_gather", 8.0, ALGORITHMS_EFF)) == {"ring", "hierarchical"}
    assert set(times_of(NODES, "all_to_all", 8.0, ALGORITHMS_EFF)) == {"direct"}
    assert set(times_of(NODES, "send", 8.0, ALGORITHMS_EFF)) == {"direct"}


def test_small_messages_take_a_tree_and_large_ones_a_ring() -> None:
    group = Group(512, 8, 3e11, 3e10)
    few, many = (times_of(group, "all_reduce", 2.0**power, Efficiency()) for power in (10, 34))
    assert few["tree"] < few["ring"] and many["ring"] < many["tree"]


@pytest.mark.parametrize("total_bytes", [1e8, 1e10])
def test_the_bucket_is_the_one_that_takes_least_time(total_bytes: float) -> None:
    """Buckets of b bytes cost their latency S/b times, and the last of them is not covered: brute force over b."""
    eff, group = Efficiency(), Group(64, 8, 3e11, 3e10)
    latency_s = min(times_of(group, "all_reduce", 1.0, eff).values())

    def uncovered_s(bucket_bytes: float) -> float:
        return total_bytes / bucket_bytes * latency_s + bucket_bytes / group.ring_bytes_per_s

    best = best_bucket_bytes(group, "all_reduce", total_bytes, eff)
    assert uncovered_s(best) <= 1.0001 * min(uncovered_s(1.02**step * 1e4) for step in range(800))
    assert best_bucket_bytes(group, "all_reduce", 1e3, eff) == 1e3


GLOO = Group(8, 2, 100.0, 10.0, link_latency_s=1.0, nic_latency_s=3.0, speaks_gloo=True)


def test_on_gloo_each_rank_sends_the_others_their_rows_and_no_tree_is_made() -> None:
    """Of eight ranks on four nodes of two, a rank sends one row to its neighbour, and then six over its own network."""
    assert set(times_of(GLOO, "all_reduce", 8.0, ALGORITHMS_EFF)) == {"direct", "hierarchical"}
    summed_s, scattered_s = (
        times_of(GLOO, name, 8000.0, ALGORITHMS_EFF)["direct"] for name in ("all_reduce", "reduce_scatter")
    )
    assert summed_s == 2 * scattered_s == pytest.approx(2 * (1 / 8 * 8000 / 100 + 6 / 8 * 8000 / 10 + 3))


def test_a_step_of_gloos_ring_waits_for_the_slowest_hop_and_half_of_its_bytes() -> None:
    """Or for all of its bytes where they take longer; and always for both between two ranks."""
    assert times_of(GLOO, "all_gather", 80.0, ALGORITHMS_EFF)["ring"] == pytest.approx(7 * (80 / 8 / 20 / 2 + 3) + 3)
    pair = replace(GLOO, size=2, per_domain=1)
    assert times_of(pair, "all_gather", 80.0, ALGORITHMS_EFF)["ring"] == pytest.approx(80 / 2 / 10 + 3)


def test_a_hierarchy_on_gloo_scatters_and_gathers_in_one_step() -> None:
    """Three levels of two, three and two ranks."""
    group = Group(12, 2, 100.0, 10.0, (Crossing(6, 1.0, 7.0),), 1.0, 3.0, speaks_gloo=True)
    sent_s = 2 * (1 / 2 * 120 / 100 + 2 / 3 * 60 / 10 + 1 / 2 * 20 / 1)
    assert times_of(group, "all_reduce", 120.0, ALGORITHMS_EFF)["hierarchical"] == pytest.approx(
        sent_s + 2 * (1 + 3) + 2 * 7
    )
    assert times_of(group, "reduce_scatter", 120.0, ALGORITHMS_EFF)["hierarchical"] == pytest.approx(
        sent_s / 2 + 1 + 3 + 7
    )


def test_a_hierarchical_all_reduce_is_two_calls_inside_each_tier_and_one_in_the_widest() -> None:
    calls = replace(ALGORITHMS_EFF, collective_latency_s=1.0)
    group = Group(12, 2, 100.0, 10.0, (Crossing(6, 1.0),))
    assert times_of(group, "all_reduce", 0.0, calls)["hierarchical"] == 2 + 2 + 1
    assert times_of(group, "all_gather", 0.0, calls)["hierarchical"] == 3


# Orders of the axes that moving nodes can make, and which ranks then lie together


ORDER_EFF = Efficiency()
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
    groups, expected = groups_in(usual, layout, found, ORDER_EFF), axis_groups(layout, found, ORDER_EFF)
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
        groups = groups_in(order, layout, fabric(layout, leaf), ORDER_EFF)
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
