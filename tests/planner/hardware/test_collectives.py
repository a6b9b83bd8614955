"""Collectives and the links they run over."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.planner.hardware.cluster import (
    Fabric,
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    group_of,
    latency_s,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator

EFF = Efficiency()


def fabric(scaleup: int = 8, nic: float = 400.0) -> Fabric:
    chip = find_accelerator("H100-SXM-80GB")
    assert chip is not None
    return Fabric(chip, 1024, 8, scaleup, 450.0, nic)


def test_large_messages_take_the_ring_volume_over_the_link() -> None:
    group = group_of(fabric(), 8, 1, EFF)
    expected = 1e10 * 7 / 8 / (450e9 * EFF.link_nvswitch)
    assert all_gather_s(group, 1e10, EFF) == pytest.approx(expected, rel=0.01)
    assert all_reduce_s(group, 1e10, EFF) == pytest.approx(2 * all_gather_s(group, 1e10, EFF))


def test_small_messages_take_the_latency() -> None:
    group = group_of(fabric(), 8, 1, EFF)
    assert all_gather_s(group, 1e3, EFF) == pytest.approx(all_gather_s(group, 1.0, EFF), rel=0.01)


def test_a_group_of_one_is_free() -> None:
    assert all_reduce_s(group_of(fabric(), 1, 1, EFF), 1e9, EFF) == 0


def test_neighbours_use_the_fast_links_and_distant_ranks_the_network() -> None:
    near, far = group_of(fabric(), 8, 1, EFF), group_of(fabric(), 8, 8, EFF)
    assert not near.crosses and far.crosses and far.per_domain == 1
    assert all_gather_s(far, 1e9, EFF) > 3 * all_gather_s(near, 1e9, EFF)


def test_all_cards_of_a_node_carry_a_ring_that_spans_nodes() -> None:
    dense, sparse = group_of(fabric(), 64, 1, EFF), group_of(fabric(), 8, 8, EFF)
    assert all_gather_s(dense, 1e9, EFF) < all_gather_s(sparse, 1e9, EFF) / 3


def test_a_rack_scale_domain_keeps_traffic_off_the_network() -> None:
    assert not group_of(fabric(scaleup=72), 64, 1, EFF).crosses


def test_copies_of_a_token_cross_to_a_node_once() -> None:
    group = group_of(fabric(), 16, 1, EFF)
    once, each = all_to_all_s(group, 8e8, 8, EFF), all_to_all_s(group, 8e8, 1, EFF)
    assert once < each / 3


def test_neighbouring_stages_send_over_the_network_when_nodes_apart() -> None:
    assert send_s(group_of(fabric(), 4, 256, EFF), 1e8, EFF) > 5 * send_s(group_of(fabric(), 4, 1, EFF), 1e8, EFF)


def test_latency_counts_the_hops_between_the_ranks() -> None:
    pair, node = group_of(fabric(), 2, 1, EFF), group_of(fabric(), 8, 1, EFF)
    across = group_of(fabric(), 16, 1, EFF)
    hops = [(latency_s(group, EFF) - EFF.collective_latency_s) / EFF.hop_latency_s for group in (pair, node, across)]
    assert hops == pytest.approx([1, 7, 9])


FREE = replace(EFF, collective_latency_s=0.0, hop_latency_s=0.0, all_to_all=0.5)


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
