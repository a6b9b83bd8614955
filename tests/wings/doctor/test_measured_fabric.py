"""Measured links as tiers that a plan takes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import combinations

import pytest

from trainspec_cli.recipe.results.tools import PairRate, PingRate
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor.tiers import check_fabric, nodes_near_one_another

NEAR, FAR = (1e9, 20e-6), (2e8, 30e-6)
"""Bytes a second, and the latency in seconds."""
LEAVES = {"ab": NEAR, "cd": NEAR}


def pairs_of(hosts: str, near: Mapping[str, tuple[float, float]], far: tuple[float, float]) -> list[PairRate]:
    found = []
    for first, second in combinations(hosts, 2):
        rate, latency_s = near.get(first + second, far)
        found.append(PairRate((first, second), rate, (PingRate(4096, latency_s, 4096 / latency_s),)))
    return found


@pytest.mark.parametrize("far", [FAR, (1e9, 80e-6)], ids=["slower", "as fast, and later"])
def test_nodes_with_better_links_among_themselves_are_a_group(far: tuple[float, float]) -> None:
    assert nodes_near_one_another(pairs_of("abcd", LEAVES, far)) == [{"a", "b"}, {"c", "d"}]


@pytest.mark.parametrize(
    ("hosts", "near"),
    [("abcd", ()), ("abc", ("ab",)), ("abcd", ("ac", "bd")), ("abcd", ("ab", "bc", "cd"))],
    ids=["all alike", "groups of two sizes", "not in the order of the nodes", "a chain"],
)
def test_other_links_are_no_groups(hosts: str, near: tuple[str, ...]) -> None:
    assert nodes_near_one_another(pairs_of(hosts, dict.fromkeys(near, NEAR), FAR)) is None


def test_of_many_nodes_only_a_chain_is_measured_and_nothing_is_said_of_groups() -> None:
    assert nodes_near_one_another(pairs_of("abcd", LEAVES, FAR)[:-1]) is None


@pytest.mark.parametrize(("nics", "gbit"), [(0, (4.0, 0.8)), (2, (8.0, 1.6)), (4, (8.0, 1.6))])
def test_the_keys_that_are_named_are_those_of_a_plan(nics: int, gbit: tuple[float, float]) -> None:
    """Two devices share what one process was measured to have, unless each has a NIC."""
    [check] = check_fabric(pairs_of("abcd", LEAVES, FAR), 2, nics)
    assert check.found.startswith("links between nodes as measured, nearer among a, b and among c, d: '")
    named = shlex.split(check.found.partition(": ")[2])
    cluster = ("cluster=h100", "cluster.num_nodes=4", "cluster.devices_per_node=2", *named)
    spec = load_for_planning(["recipe=llama3_8b", *cluster]).spec
    described = [(tier.devices, tier.gbit_per_s, tier.latency_us) for tier in spec.cluster.fabric.tiers]
    assert described == [(None, None, None), (4, gbit[0], 20.0), (None, gbit[1], 30.0)]
    assert spec.cluster.efficiency == {"nic": 1.0}
    assert {tier.kind for tier in spec.cluster.fabric.tiers[1:]} == {"measured"}


def test_links_that_are_alike_are_one_network() -> None:
    [check] = check_fabric(pairs_of("abc", {}, FAR), 1, 0)
    assert (
        "cluster.fabric.tiers=[{name: domain},{name: network,gbit_per_s: 1.6,latency_us: 30,kind: measured}"
        in check.found
    )
    assert list(check_fabric([], 1, 0)) == []
