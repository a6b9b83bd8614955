"""The network as the kernel shows it."""

from __future__ import annotations

from pathlib import Path

from lab.sysfs import Sysfs

from trainspec_cli.recipe.results.doctor import Check
from trainspec_cli.wings.doctor.checks import check_nics
from trainspec_cli.wings.doctor.found_fabric import Nic
from trainspec_cli.wings.doctor.sysfs import read_interfaces, read_nics


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


def test_interfaces_that_are_up_and_real_are_read(tmp_path: Path) -> None:
    """A bond counts for the interfaces in it; the kernel writes -1, or refuses to say, where there is no speed."""
    made = Sysfs(tmp_path)
    made.interface("eth0", "100000", path="pci0000:00/0000:00:03.0")
    made.interface("eth1", "-1", path="pci0000:00/0000:00:04.0")
    made.interface("eth2", "25000", state="down", path="pci0000:00/0000:00:05.0")
    slave = made.interface("eth3", "25000", path="pci0000:00/0000:00:06.0")
    bond = made.interface("bond0", "50000")
    (bond / "bonding").mkdir()
    (slave / "master").symlink_to(bond)
    made.interface("docker0", "10000")
    found = read_interfaces(tmp_path / "class/net")
    assert [(one.name, one.gbit_per_s, one.kind) for one in found] == [
        ("bond0", 50.0, "ethernet"),
        ("eth0", 100.0, "ethernet"),
        ("eth1", None, "ethernet"),
    ]
    assert found[1].pci_path == ("pci0000:00", "0000:00:03.0")
