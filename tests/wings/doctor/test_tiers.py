"""The tiers of a fabric that was found."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path

import pytest

from trainspec_cli.recipe.keys.cluster import TierSpec
from trainspec_cli.recipe.results.tools import PairRate, PingRate
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.doctor.discover import parse_matrix
from trainspec_cli.wings.doctor.found_fabric import FoundGpu, Nic
from trainspec_cli.wings.doctor.switches import read_levels
from trainspec_cli.wings.doctor.tiers import (
    check_fabric,
    groups_by,
    near_groups,
    network_of,
    network_tiers,
    node_tiers,
    rails,
    with_measured,
)

DATA = Path(__file__).parents[2] / "data" / "topology"
TREE = "".join(f"SwitchName=leaf{leaf} Level=0 Nodes=n[{2 * leaf}-{2 * leaf + 1}]\n" for leaf in range(2)) + (
    "SwitchName=top Level=1 Nodes=n[0-3] Switches=leaf[0-1]\n"
)


def gpus_of(name: str) -> list[FoundGpu]:
    return parse_matrix((DATA / f"{name}.txt").read_text(), name)


def joined(number: int, pairs: str, link: str = "NV4") -> list[FoundGpu]:
    """GPUs with NVLink between some `pairs` (`01 23`)."""
    bridged = [set(pair) for pair in pairs.split()]
    return [
        FoundGpu(
            f"GPU{one}",
            {f"GPU{far}": link if {str(one), str(far)} in bridged else "SYS" for far in range(number) if far != one},
            pcie_gbit_per_s=252.1,
        )
        for one in range(number)
    ]


@pytest.mark.parametrize(
    ("name", "tiers", "remark"),
    [
        ("dgx_h100", [("nvlink", None)], ""),
        ("dgx_a100", [("nvlink", None)], ""),
        ("a100_pcie", [("nvlink", 2), ("pcie", 8)], ""),
        ("l40s", [("pcie", None)], "{name: pcie, devices: 2}, {name: node, devices: 4, gbit_per_s: ...}"),
        ("v100_pcie", [("pcie", None)], "GPU0 to GPU3 and GPU4 to GPU7"),
        ("rtx_4090", [("pcie", None)], ""),
        ("rtx_4090_two_sockets", [("pcie", None)], ""),
    ],
)
def test_a_node_has_the_tiers_of_its_links(name: str, tiers: list[tuple[str, int | None]], remark: str) -> None:
    found, remarks = node_tiers(gpus_of(name), "nvidia-smi", len(gpus_of(name)))
    assert [(tier.spec.name, tier.spec.devices) for tier in found] == tiers
    assert len(remarks) == bool(remark) and all(remark in one for one in remarks)
    assert all("gbit_per_s" in tier.left_out for tier in found), "the matrix has no rates"


def test_bridges_are_a_tier_below_pcie() -> None:
    (bridge, pcie), remarks = node_tiers(joined(4, "01 23"), "nvidia-smi", 4)
    assert (bridge.spec, pcie.spec) == (TierSpec("nvlink", 2), TierSpec("pcie", 4, 252.1))
    assert (remarks, pcie.left_out) == ([], {})
    two_devices, _ = node_tiers(joined(4, "01 23"), "nvidia-smi", 2)
    assert [tier.spec for tier in two_devices] == [TierSpec("nvlink")], "with two devices per node no traffic uses PCIe"


@pytest.mark.parametrize(
    ("number", "pairs", "order"),
    [(4, "02 13", "0,2,1,3"), (3, "12", "1,2,0"), (5, "14", "1,4,0,2,3")],
)
def test_bridges_between_other_than_consecutive_ranks_are_a_remark(number: int, pairs: str, order: str) -> None:
    (only,), (remark,) = node_tiers(joined(number, pairs), "nvidia-smi", number)
    assert only.spec == TierSpec("pcie", gbit_per_s=252.1)
    assert f"CUDA_VISIBLE_DEVICES={order} " in remark


def test_a_mesh_with_missing_pairs_is_one_domain() -> None:
    """In a DGX-1, no GPU has NVLink to all others."""
    (only,), (remark,) = node_tiers(joined(4, "01 12 23 30"), "nvidia-smi", 4)
    assert only.spec == TierSpec("nvlink")
    assert "4 of the 6 pairs" in remark
    assert groups_by(joined(4, "03 12"), lambda link: link != "SYS") == [["GPU0", "GPU3"], ["GPU1", "GPU2"]]


def test_rails_are_the_nics_below_the_switch_of_each_gpu() -> None:
    nics = [f"NIC{number}" for number in range(12)]
    assert list(rails(gpus_of("dgx_h100"), nics).values()) == [
        [f"NIC{number}"] for number in (0, 3, 4, 5, 6, 9, 10, 11)
    ]
    pairs = rails(gpus_of("dgx_a100"), [f"mlx5_{number}" for number in range(12)])
    assert pairs["GPU6"] == pairs["GPU7"] == ["mlx5_8", "mlx5_9"]
    assert rails(gpus_of("l40s"), ["mlx5_0", "mlx5_1"]) == {}
    assert rails(gpus_of("dgx_h100"), nics[1:]) == {}, "the NIC of GPU0 is down"


def test_a_devices_share_is_that_of_the_nics_near_gpus() -> None:
    """Four of a DGX H100's twelve NICs are for storage."""
    nics = [Nic(f"NIC{number}", 400 if number not in (1, 2, 7, 8) else 200, kind="infiniband") for number in range(12)]
    network = network_of(gpus_of("dgx_h100"), nics, [], 8, "nothing")
    assert network.tier == TierSpec("network", gbit_per_s=400.0, kind="infiniband")
    assert (network.rdma_nics, network.found.endswith(": NIC1, NIC2, NIC7, NIC8")) == (8, True)


def test_without_rails_the_fastest_kind_of_nics_is_shared_at_the_lowest_rate() -> None:
    nics = [Nic("a", 200, kind="roce"), Nic("b", 100, kind="roce"), Nic("c", 200, kind="infiniband")]
    assert network_of([], nics, [], 8, "nothing").tier == TierSpec("network", gbit_per_s=25.0, kind="roce")


def test_without_rdma_the_fastest_interface_is_shared() -> None:
    interfaces = [Nic("eth0", 10.0), Nic("eth1", 100.0), Nic("eth2", None)]
    network = network_of([], [], interfaces, 4, "nothing")
    assert (network.tier, network.rdma_nics) == (TierSpec("network", gbit_per_s=25.0, kind="ethernet"), 0)
    unknown = network_of([], [], interfaces[2:], 4, "/sys/class")
    assert (unknown.tier, unknown.source) == (TierSpec("network"), "/sys/class")
    assert "gbit_per_s" in network_tiers(unknown, [], "", 4)[0].left_out


def pairs_of(near: float, far: float) -> list[PairRate]:
    """n0 and n1, n2 and n3 at `near` bytes per second, all others at `far`."""
    rates = {("n0", "n1"): near, ("n2", "n3"): near}
    ping = (PingRate(4096, 20e-6, 4096 / 20e-6),)
    return [PairRate(pair, rates.get(pair, far), ping) for pair in combinations(["n0", "n1", "n2", "n3"], 2)]


def test_measured_pairs_belong_to_the_lowest_of_slurms_levels_that_connects_them() -> None:
    levels = read_levels(TREE)
    network = network_of([], [Nic("mlx5_0", 200.0)], [], 2, "")
    leaf, top = network_tiers(network, levels, "Slurm", 2)
    assert (leaf.spec, top.spec) == (
        TierSpec("level0", 4, 100.0, kind="infiniband"),
        TierSpec("network", None, 100.0, kind="infiniband"),
    )
    assert ("oversubscription" in leaf.left_out, "oversubscription" in top.left_out) == (False, True)
    near, far = with_measured([leaf, top], pairs_of(20e9, 15e9), levels, "doctor.json", 2, 1)
    assert (near.spec.devices, near.spec.gbit_per_s, far.spec.gbit_per_s) == (4, 80.0, 60.0)
    assert (far.spec.latency_us, far.left_out) == (20.0, {})
    only_near = [pair for pair in pairs_of(20e9, 15e9) if pair.hosts in (("n0", "n1"), ("n2", "n3"))]
    assert with_measured([leaf, top], only_near, levels, "doctor.json", 2, 1)[1] == top


def test_without_slurm_measured_links_group_the_nodes() -> None:
    plain = network_tiers(network_of([], [], [], 2, ""), [], "", 2)
    near, far = with_measured(plain, pairs_of(20e9, 5e9), [], "doctor.json", 2, 2)
    assert (near.spec.name, near.spec.devices, near.spec.gbit_per_s) == ("near", 4, 160.0)
    assert (far.spec.name, far.spec.devices, far.spec.gbit_per_s) == ("network", None, 40.0)


# Measured links

NEAR, FAR = (1e9, 20e-6), (2e8, 30e-6)
"""Bytes a second, and the latency in seconds."""
LEAVES = {"ab": NEAR, "cd": NEAR}


def measured_pairs(hosts: str, near: Mapping[str, tuple[float, float]], far: tuple[float, float]) -> list[PairRate]:
    found = []
    for first, second in combinations(hosts, 2):
        rate, latency_s = near.get(first + second, far)
        found.append(PairRate((first, second), rate, (PingRate(4096, latency_s, 4096 / latency_s),)))
    return found


@pytest.mark.parametrize("far", [FAR, (1e9, 80e-6)], ids=["slower", "equal rate, higher latency"])
def test_nodes_with_better_links_between_them_are_a_group(far: tuple[float, float]) -> None:
    assert near_groups(measured_pairs("abcd", LEAVES, far)) == [{"a", "b"}, {"c", "d"}]


@pytest.mark.parametrize(
    ("hosts", "near"),
    [("abcd", ()), ("abc", ("ab",)), ("abcd", ("ac", "bd")), ("abcd", ("ab", "bc", "cd"))],
    ids=["all alike", "groups of two sizes", "not in the order of the nodes", "a chain"],
)
def test_other_links_are_not_groups(hosts: str, near: tuple[str, ...]) -> None:
    assert near_groups(measured_pairs(hosts, dict.fromkeys(near, NEAR), FAR)) is None


def test_without_all_pairs_there_are_no_groups() -> None:
    assert near_groups(measured_pairs("abcd", LEAVES, FAR)[:-1]) is None


@pytest.mark.parametrize(("nics", "gbit"), [(0, (4.0, 0.8)), (2, (8.0, 1.6)), (4, (8.0, 1.6))])
def test_measured_links_become_keys_for_plans(nics: int, gbit: tuple[float, float]) -> None:
    """Two devices share the measured rate of one process, unless each has a NIC."""
    [check] = check_fabric(measured_pairs("abcd", LEAVES, FAR), 2, nics)
    assert "a, b" in check.found and "c, d" in check.found
    keys = shlex.split(check.found.partition(": ")[2])
    cluster = ("cluster=h100", "cluster.num_nodes=4", "cluster.devices_per_node=2", *keys)
    spec = load_for_planning(["recipe=llama3_8b", *cluster]).spec
    described = [(tier.devices, tier.gbit_per_s, tier.latency_us) for tier in spec.cluster.fabric.tiers]
    assert described == [(None, None, None), (4, gbit[0], 20.0), (None, gbit[1], 30.0)]
    assert spec.cluster.efficiency == {"nic": 1.0}
    assert {tier.kind for tier in spec.cluster.fabric.tiers[1:]} == {"measured"}


def test_equal_links_are_one_network() -> None:
    [check] = check_fabric(measured_pairs("abc", {}, FAR), 1, 0)
    assert (
        "cluster.fabric.tiers=[{name: domain},{name: network,gbit_per_s: 1.6,latency_us: 30,kind: measured}"
        in check.found
    )
    assert list(check_fabric([], 1, 0)) == []
