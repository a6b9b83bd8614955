"""The blueprint of a layout: the order of its axes, its exchanges, and what goes into the environment."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from trainspec_cli.planner.blueprint import draw_blueprint, groups_in, orders, tree_until_bytes
from trainspec_cli.planner.hardware.cluster import Fabric, Group, with_tiers
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import assemble_step, estimate_step, micro_batch
from trainspec_cli.recipe.keys.cluster import FabricSpec, TierSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.results.blueprint import Blueprint

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
