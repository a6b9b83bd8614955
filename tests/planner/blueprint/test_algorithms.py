"""Time of an exchange by each algorithm."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from trainspec_cli.planner.blueprint import (
    best_bucket_bytes,
    levels_of,
    times_of,
)
from trainspec_cli.planner.hardware.cluster import Crossing, Group
from trainspec_cli.planner.hardware.rates import Efficiency

EFF = replace(Efficiency(), collective_latency_s=0.0, hop_latency_s=0.0)
NODES = Group(32, 8, 100.0, 10.0)


def test_a_hierarchy_takes_the_published_time() -> None:
    """2 (g-1)/g S/B_in + 2 (n-1)/n S/(g B_rail), g = 8 in a node, n = 4 nodes."""
    expected = 2 * 7 / 8 * 800 / 100 + 2 * 3 / 4 * 800 / (8 * 10)
    assert times_of(NODES, "all_reduce", 800.0, EFF)["hierarchical"] == pytest.approx(expected)
    assert times_of(NODES, "all_gather", 800.0, EFF)["hierarchical"] == pytest.approx(expected / 2)


def test_a_flat_ring_takes_the_narrowest_tier_and_waits_for_its_longest_hop_at_every_step() -> None:
    assert times_of(NODES, "all_reduce", 800.0, EFF)["ring"] == pytest.approx(2 * 31 / 32 * 800 / 80)
    slow = replace(NODES, link_latency_s=1.0, nic_latency_s=3.0)
    assert times_of(slow, "all_reduce", 0.0, EFF)["ring"] == 2 * 31 * 3
    assert times_of(slow, "reduce_scatter", 0.0, EFF)["ring"] == 31 * 3
    assert times_of(slow, "all_reduce", 0.0, EFF)["hierarchical"] == 2 * (7 * 1 + 3 * 3)


def test_a_tree_has_the_latency_of_its_depth() -> None:
    slow = replace(NODES, link_latency_s=1.0, nic_latency_s=3.0)
    assert times_of(slow, "all_reduce", 0.0, EFF)["tree"] == 2 * (7 * 1 + math.log2(4) * 3)
    alone = Group(64, 1, 1.0, 1.0, nic_latency_s=3.0)
    assert times_of(alone, "all_reduce", 0.0, EFF)["tree"] == 2 * math.log2(64) * 3
    assert times_of(NODES, "all_reduce", 800.0, EFF)["tree"] == pytest.approx(2 * 800 / 80 / 0.92)


def test_three_tiers_are_three_rings() -> None:
    group = Group(64, 4, 100.0, 10.0, (Crossing(16, 1.0),))
    assert [(level.joined, level.below, level.bytes_per_s) for level in levels_of(group, EFF)] == [
        (4, 1, 100.0), (4, 4, 10.0), (4, 16, 1.0),
    ]  # fmt: skip
    expected = 2 * 3 / 4 * (640 / 100 + 640 / 4 / 10 + 640 / 16 / 1)
    assert times_of(group, "all_reduce", 640.0, EFF)["hierarchical"] == pytest.approx(expected)


def test_one_tier_has_no_hierarchy_and_only_an_all_reduce_a_tree() -> None:
    assert set(times_of(Group(8, 8, 1.0, 1.0), "all_reduce", 8.0, EFF)) == {"ring", "tree"}
    assert set(times_of(NODES, "all_gather", 8.0, EFF)) == {"ring", "hierarchical"}
    assert set(times_of(NODES, "all_to_all", 8.0, EFF)) == {"direct"}
    assert set(times_of(NODES, "send", 8.0, EFF)) == {"direct"}


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
    assert set(times_of(GLOO, "all_reduce", 8.0, EFF)) == {"direct", "hierarchical"}
    summed_s, scattered_s = (times_of(GLOO, name, 8000.0, EFF)["direct"] for name in ("all_reduce", "reduce_scatter"))
    assert summed_s == 2 * scattered_s == pytest.approx(2 * (1 / 8 * 8000 / 100 + 6 / 8 * 8000 / 10 + 3))


def test_a_step_of_gloos_ring_waits_for_the_slowest_hop_and_half_of_its_bytes() -> None:
    """Or for all of its bytes where they take longer; and always for both between two ranks."""
    assert times_of(GLOO, "all_gather", 80.0, EFF)["ring"] == pytest.approx(7 * (80 / 8 / 20 / 2 + 3) + 3)
    pair = replace(GLOO, size=2, per_domain=1)
    assert times_of(pair, "all_gather", 80.0, EFF)["ring"] == pytest.approx(80 / 2 / 10 + 3)


def test_a_hierarchy_on_gloo_scatters_and_gathers_in_one_step() -> None:
    """Three levels of two, three and two ranks."""
    group = Group(12, 2, 100.0, 10.0, (Crossing(6, 1.0, 7.0),), 1.0, 3.0, speaks_gloo=True)
    sent_s = 2 * (1 / 2 * 120 / 100 + 2 / 3 * 60 / 10 + 1 / 2 * 20 / 1)
    assert times_of(group, "all_reduce", 120.0, EFF)["hierarchical"] == pytest.approx(sent_s + 2 * (1 + 3) + 2 * 7)
    assert times_of(group, "reduce_scatter", 120.0, EFF)["hierarchical"] == pytest.approx(sent_s / 2 + 1 + 3 + 7)


def test_a_hierarchical_all_reduce_is_two_calls_inside_each_tier_and_one_in_the_widest() -> None:
    calls = replace(EFF, collective_latency_s=1.0)
    group = Group(12, 2, 100.0, 10.0, (Crossing(6, 1.0),))
    assert times_of(group, "all_reduce", 0.0, calls)["hierarchical"] == 2 + 2 + 1
    assert times_of(group, "all_gather", 0.0, calls)["hierarchical"] == 3
