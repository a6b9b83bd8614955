"""Collectives and the links they run over."""

from __future__ import annotations

import pytest

from trainspec_cli.planner.hardware.catalogue import find_accelerator
from trainspec_cli.planner.hardware.collectives import all_gather_s, all_reduce_s, all_to_all_s, latency_s, send_s
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Fabric, group_of

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
