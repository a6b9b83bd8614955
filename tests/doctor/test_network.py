"""The network as the kernel and Slurm show it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.doctor.network import (
    Nic,
    check_nics,
    check_switches,
    count_hosts,
    nodes_below_switches,
    read_nics,
)
from trainspec_cli.session.load import load_for_planning
from trainspec_cli.spec.results.doctor import Check

TOPOLOGY = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=gpu[001-016]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=gpu[017-030],login
SwitchName=row1 Level=1 LinkSpeed=1 Nodes=gpu[001-030],login Switches=leaf[1-2]
SwitchName=row2 Level=1 LinkSpeed=1 Nodes=gpu[031-090] Switches=leaf[3-6]
SwitchName=top Level=2 LinkSpeed=1 Nodes=gpu[001-090],login Switches=row[1-2]
"""


def make_nic(folder: Path, name: str, rate: str, numa: str = "0", state: str = "4: ACTIVE") -> None:
    port = folder / name / "ports" / "1"
    port.mkdir(parents=True)
    (port / "rate").write_text(f"{rate}\n")
    (port / "state").write_text(f"{state}\n")
    (folder / name / "device").mkdir()
    (folder / name / "device" / "numa_node").write_text(f"{numa}\n")


def test_nics_have_a_rate_and_a_numa_node(tmp_path: Path) -> None:
    make_nic(tmp_path, "mlx5_1", "400 Gb/sec (4X NDR)", "1")
    make_nic(tmp_path, "mlx5_0", "2.5 Gb/sec (1X SDR)", "-1")
    make_nic(tmp_path, "mlx5_2", "400 Gb/sec (4X NDR)", state="1: DOWN")
    assert read_nics(tmp_path) == [Nic("mlx5_0", 2.5, None), Nic("mlx5_1", 400, 1)]
    assert read_nics(tmp_path / "nothing") == []


def test_the_key_that_they_are_worth_is_named(tmp_path: Path) -> None:
    for number in range(4):
        make_nic(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)", str(number // 2))
    found = "4 NICs on NUMA nodes 0, 1, 1600 Gbit/s together; for 8 devices cluster.nic_gbit_per_s=200"
    assert list(check_nics(8, tmp_path)) == [Check("nics", "ok", found)]
    assert list(check_nics(8, tmp_path / "nothing")) == []


def test_different_rates_are_warned_of(tmp_path: Path) -> None:
    make_nic(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    make_nic(tmp_path, "mlx5_1", "100 Gb/sec (4X EDR)")
    [check] = check_nics(8, tmp_path)
    assert check.status == "warn" and "mlx5_0 400, mlx5_1 100" in check.found


@pytest.mark.parametrize(
    ("hosts", "number"),
    [("gpu[001-004,7],login", 6), ("a", 1), ("a,b", 2), ("n[1-2],m[5]", 3), ("rack[1-2]-gpu", 2), ("n[09-11]", 3)],
)
def test_names_of_a_host_list_are_counted(hosts: str, number: int) -> None:
    assert count_hosts(hosts) == number


def test_switches_become_tiers_that_a_plan_takes() -> None:
    assert nodes_below_switches(TOPOLOGY) == [16, 60, 91]
    [check] = check_switches(TOPOLOGY, 8)
    key = check.found.partition(": ")[2]
    assert key.startswith("cluster.fabric.tiers=[{name: domain},{name: level0,devices: 128},")
    spec = load_for_planning(["recipe=llama3_70b", "cluster=h100", "cluster.num_nodes=90", key]).spec
    assert [tier.devices for tier in spec.cluster.fabric.tiers] == [None, 128, 480, None]


@pytest.mark.parametrize(
    "topology", ["", "No topology information available\n", "SwitchName=s1 Level=0 LinkSpeed=1 Nodes=node[1-4]\n"]
)
def test_one_switch_or_none_is_no_tier(topology: str) -> None:
    assert list(check_switches(topology, 8)) == []


def test_a_level_that_joins_nothing_is_left_out() -> None:
    text = "SwitchName=a Level=0 Nodes=n[1-4]\nSwitchName=b Level=1 Nodes=n[1-4]\nSwitchName=c Level=2 Nodes=n[1-8]\n"
    [check] = check_switches(text, 1)
    assert "up to 4, 8 nodes" in check.found and "level1" not in check.found
