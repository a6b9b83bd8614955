"""Networks of several tiers: what a group of ranks crosses, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.planner.hardware.cluster import (
    Crossing,
    Fabric,
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    axis_groups,
    describe_fabric,
    group_of,
    latency_s,
    reduce_scatter_s,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, models
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import estimate_step
from trainspec_cli.recipe.keys.cluster import ClusterSpec, FabricSpec, TierSpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.session.recipe.load import load_for_planning

EFF = Efficiency()
MODELS = models()
FREE = replace(EFF, collective_latency_s=0.0, hop_latency_s=0.0, all_to_all=0.5)
PRESETS = sorted(path.stem for path in (Path(__file__).parents[3] / "conf" / "fabric").glob("*.yaml"))
DOMAIN, LEAF = TierSpec("nvlink"), TierSpec("leaf", 32)


def fabric(*tiers: TierSpec, nodes: int = 16) -> Fabric:
    chip = find_accelerator("H100-SXM-80GB")
    cluster = ClusterSpec(nodes, 8, accelerator=chip, nic_gbit_per_s=400.0, fabric=FabricSpec(tiers=tiers))
    return describe_fabric(cluster, None)


@pytest.mark.parametrize("layout", [Layout(tp=8, pp=4, dp_shard=4), Layout(tp=2, ep=8, dp_shard=16, dp_replicate=4)])
def test_the_tiers_of_a_plain_network_cost_what_no_tiers_cost(layout: Layout) -> None:
    plain, described = (axis_groups(layout, one, EFF) for one in (fabric(), fabric(DOMAIN, TierSpec("network"))))
    for axis, group in plain.items():
        assert described[axis] == group
        assert latency_s(described[axis], EFF) == latency_s(group, EFF)
        assert all_gather_s(described[axis], 1e9, EFF) == all_gather_s(group, 1e9, EFF)


def test_what_a_tier_leaves_open_is_the_clusters() -> None:
    found = fabric(DOMAIN, LEAF, TierSpec("spine", oversubscription=4, kind="roce", latency_us=3))
    leaf, spine = found.network
    assert (found.scaleup_devices, found.link_gb_per_s) == (8, 450)
    assert (leaf.devices, leaf.gbit_per_s, leaf.kind, leaf.latency_s) == (32, 400, "infiniband", None)
    assert (spine.devices, spine.gbit_per_s, spine.kind, spine.latency_s) == (128, 100, "roce", 3e-6)
    own = fabric(TierSpec("rack", 64, 1600, 2, 1), TierSpec("network"))
    assert (own.scaleup_devices, own.link_gb_per_s, own.link_latency_s) == (64, 100, 1e-6)


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(
        [
            Layout(tp=8, pp=4, dp_shard=4, zero_stage=1),
            Layout(dp_shard=8, dp_replicate=16),
            Layout(dp_shard=128, ep=16),
            Layout(cp=16, tp=8),
        ]
    ),
    tiers=st.sampled_from([(), (DOMAIN, LEAF, TierSpec("spine", oversubscription=2))]),
    ratios=st.tuples(st.floats(1, 16), st.floats(1, 16)).map(sorted),
)
def test_a_step_never_gets_shorter_where_the_network_is_oversubscribed_more(
    layout: Layout, tiers: tuple[TierSpec, ...], ratios: list[float]
) -> None:
    model = MODELS["mixtral_8x7b" if layout.ep > 1 else "llama3_8b"]
    low, high = (
        estimate_step(Setup(model, layout, oversubscribed(*tiers, ratio=ratio), 4096, 1.0, 8), EFF) for ratio in ratios
    )
    assert low.total_s <= high.total_s * (1 + 1e-12)


def test_one_to_one_changes_nothing_and_the_clusters_ratio_is_that_of_the_last_tier() -> None:
    assert oversubscribed(ratio=1) == oversubscribed(ratio=None)
    tiers = DOMAIN, LEAF, TierSpec("spine", oversubscription=3)
    assert oversubscribed(*tiers, ratio=None) == oversubscribed(*tiers, ratio=3) == fabric(*tiers)
    assert [tier.gbit_per_s for tier in oversubscribed(*tiers, ratio=8).network] == [400, 50]


def test_bytes_that_cross_an_oversubscribed_network_take_as_many_times_as_long() -> None:
    """Exchanges between nodes are three times as long at 3:1, those inside one as long as before."""
    plain, narrow = (axis_groups(Layout(tp=8, pp=2, dp_shard=8), oversubscribed(ratio=n), FREE) for n in (1, 3))
    for exchange_s in (lambda group: all_gather_s(group, 1e9, FREE), lambda group: send_s(group, 1e9, FREE)):
        for axis, times in (("tp", 1), ("dp", 3), ("pp", 3)):
            assert exchange_s(narrow[axis]) == pytest.approx(times * exchange_s(plain[axis]))
    spread, wide = (group_of(oversubscribed(ratio=n), 16, 8, FREE) for n in (3, 1))
    assert all_to_all_s(spread, 1e9, 1, FREE) == pytest.approx(3 * all_to_all_s(wide, 1e9, 1, FREE))


def oversubscribed(*tiers: TierSpec, ratio: float | None) -> Fabric:
    chip = find_accelerator("H100-SXM-80GB")
    described = FabricSpec(tiers=tiers)
    cluster = ClusterSpec(16, 8, accelerator=chip, nic_gbit_per_s=400.0, fabric=described, oversubscription=ratio)
    return describe_fabric(cluster, None)


def test_a_ring_in_the_order_of_the_tiers_leaves_an_element_once() -> None:
    """Four ranks of a leaf carry a ring each to the next: 4:1 oversubscription costs them nothing, 8:1 half."""
    for oversubscription, slower in ((4.0, 1.0), (8.0, 2.0)):
        found = fabric(DOMAIN, LEAF, TierSpec("spine", oversubscription=oversubscription))
        group = group_of(found, 16, 8, FREE)
        inside = Group(16, 1, group.link_bytes_per_s, group.nic_bytes_per_s)
        assert group.outer == (Crossing(4, group.nic_bytes_per_s / oversubscription),)
        assert all_gather_s(group, 1e9, FREE) == pytest.approx(slower * all_gather_s(inside, 1e9, FREE))


def test_a_group_below_one_element_does_not_feel_the_tiers_above() -> None:
    narrow = fabric(DOMAIN, LEAF, TierSpec("spine", oversubscription=1000))
    inside, across = group_of(narrow, 4, 8, EFF), group_of(narrow, 8, 8, EFF)
    assert inside.outer == () and len(across.outer) == 1
    assert inside == group_of(fabric(), 4, 8, EFF)


def test_all_to_all_takes_the_tier_that_is_busy_longest() -> None:
    group = Group(16, 2, 100.0, 10.0, (Crossing(8, 1.0),))
    assert all_to_all_s(group, 160.0, 1, FREE) == pytest.approx(160 * 8 / 16 / 1.0)
    assert all_to_all_s(replace(group, outer=(Crossing(8, 100.0),)), 160.0, 1, FREE) == pytest.approx(
        160 * 14 / 16 / 10
    )


def test_tokens_of_several_experts_cross_to_each_domain_beyond_once() -> None:
    group = Group(16, 2, 1e9, 1e9, (Crossing(8, 1.0),))
    others = (8 - 4) * (1 - (1 - 1 / 8) ** 8)
    assert all_to_all_s(group, 160.0, 8, FREE) == pytest.approx(160 / 8 * others)


def test_a_send_waits_for_the_pair_on_both_sides_of_the_line() -> None:
    plain = Group(4, 2, 100.0, 10.0)
    assert send_s(plain, 100.0, FREE) == 1
    assert send_s(replace(plain, outer=(Crossing(2, 5.0, 7.0),)), 100.0, FREE) == 7 + 20
    apart = replace(plain, per_domain=1, link_latency_s=1.0, nic_latency_s=9.0)
    assert send_s(apart, 100.0, FREE) == 9 + 100 / apart.nic_bytes_per_s


def test_latencies_of_tiers_add_up() -> None:
    hop = replace(FREE, hop_latency_s=1.0)
    group = Group(32, 4, 1.0, 1.0, (Crossing(16, 1.0, 10.0),))
    assert latency_s(group, hop) == 3 + 2 * 2 + 2 * 1 * 10
    assert latency_s(replace(group, link_latency_s=0.0, nic_latency_s=100.0), hop) == 2 * 2 * 100 + 2 * 10


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_describes_a_cluster(preset: str) -> None:
    arguments = ["recipe=llama3_70b", "cluster=h100", "cluster.num_nodes=1024", f"fabric={preset}"]
    spec = load_for_planning(arguments).spec
    found = describe_fabric(spec.cluster, None)
    assert found.name == spec.cluster.fabric.name == preset.replace("flat", "")
    assert found.network[-1].devices >= 8192
    dp = axis_groups(Layout(tp=8, dp_shard=1024), found, EFF)["dp"]
    assert all_gather_s(dp, 1e9, EFF) >= all_gather_s(replace(dp, outer=()), 1e9, EFF) > 0


def test_between_cpus_collectives_are_gloos_and_a_hop_is_a_round_trip() -> None:
    tiers = TierSpec("links", latency_us=1), TierSpec("leaf", 32, latency_us=20), TierSpec("spine", latency_us=50)
    of_gpus = fabric(*tiers)
    of_cpus = replace(of_gpus, chip=replace(of_gpus.chip, vendor="cpu"))
    for one, times in ((of_gpus, 1), (of_cpus, 2)):
        group = group_of(one, 128, 1, EFF)
        assert group.speaks_gloo == (times == 2)
        found_s = (group.link_latency_s, group.nic_latency_s, group.outer[0].latency_s)
        assert found_s == pytest.approx([times * 1e-6, times * 20e-6, times * 50e-6])
    pair = replace(group_of(of_cpus, 8, 1, FREE), link_bytes_per_s=1.0)
    assert reduce_scatter_s(pair, 1e3, FREE) == pytest.approx(1e3 * 7 / 8)


# Collectives and the links they run over


def fabric_of_collectives(scaleup: int = 8, nic: float = 400.0) -> Fabric:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    return Fabric(chip, 1024, 8, scaleup, 450.0, nic)


@pytest.mark.parametrize(
    ("group", "seconds"),
    [
        (Group(4, 4, 10.0, 1.0), 80 * 3 / 4 / 10),
        (Group(16, 8, 10.0, 1.0), 80 * 15 / 16 / 8),
        (Group(16, 8, 10.0, 2.0), 80 * 15 / 16 / 10),
        (Group(4, 1, 10.0, 1.0), 80 * 3 / 4),
        (Group(1, 1, 10.0, 1.0), 0),
    ],
    ids=["one node", "two nodes' cards", "two nodes' links", "one rank a node", "alone"],
)
def test_bytes_go_over_the_narrower_of_links_and_cards(group: Group, seconds: float) -> None:
    assert all_gather_s(group, 80.0, FREE) == pytest.approx(seconds)
    assert all_reduce_s(group, 80.0, FREE) == pytest.approx(2 * seconds)
    assert all_gather_s(group, 0.0, EFF) == 0


@pytest.mark.parametrize(
    ("group", "copies", "seconds"),
    [
        (Group(4, 4, 10.0, 1.0), 1, 80 * 3 / 4 / 5),
        (Group(4, 4, 10.0, 1.0), 8, 80 * 3 / 4 / 5),
        (Group(16, 8, 10.0, 1.0), 1, 80 * 8 / 16),
        (Group(16, 8, 10.0, 1.0), 4, 80 / 4 * (1 - 0.5**4)),
        (Group(32, 8, 10.0, 1.0), 2, 80 / 2 * 3 * (1 - 0.75**2)),
        (Group(16, 8, 10.0, 1e9), 1, 80 * 7 / 16 / 5),
        (Group(1, 1, 10.0, 1.0), 1, 0),
    ],
    ids=["one node", "copies in one node", "two nodes", "each once a node", "fewer copies than nodes", "a fast network",
         "alone"],
)  # fmt: skip
def test_tokens_go_to_their_experts(group: Group, copies: int, seconds: float) -> None:
    assert all_to_all_s(group, 80.0, copies, FREE) == pytest.approx(seconds)
    assert all_to_all_s(group, 0.0, copies, EFF) == 0
    latency = replace(FREE, collective_latency_s=1.0)
    assert all_to_all_s(group, 80.0, copies, latency) == pytest.approx(seconds + (group.size > 1))


def test_a_neighbour_is_reached_over_its_link_unless_every_rank_is_on_another_node() -> None:
    latency = replace(FREE, collective_latency_s=3.0)
    groups = (Group(4, 4, 10.0, 1.0), Group(4, 2, 10.0, 1.0), Group(4, 1, 10.0, 1.0), Group(1, 1, 10.0, 1.0))
    assert [send_s(group, 80.0, latency) for group in groups] == [11, 11, 83, 0]


def test_trees_over_domains_grow_with_the_logarithm() -> None:
    latency = replace(FREE, hop_latency_s=1.0)
    assert [latency_s(Group(size, 4, 1.0, 1.0), latency) for size in (4, 8, 12, 16, 20)] == [3, 5, 7, 7, 9]
    assert latency_s(Group(72, 72, 1.0, 1.0), latency) == 7, "a switch is no longer than eight"
    assert latency_s(Group(1, 1, 1.0, 1.0), replace(latency, collective_latency_s=1.0)) == 0
