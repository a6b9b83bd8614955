"""GPUs, PCIe, NUMA nodes and the network, read from the kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.sysfs import Sysfs

from trainspec_cli.wings.doctor.checks import check_nics
from trainspec_cli.wings.doctor.found_fabric import FoundGpu, Nic, NumaNode
from trainspec_cli.wings.doctor.sysfs import add_pci_facts, read_gpus, read_interfaces, read_nics, read_numa_nodes

SWITCH = "pci0000:15/0000:15:01.0/0000:16:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Sysfs:
    """Two GPUs and a NIC below one switch, a third GPU below another port of the CPU, a fourth on the other socket."""
    made = Sysfs(tmp_path)
    made.device("pci0000:15/0000:15:01.0", vendor="0x8086", **{"class": "0x060400"}, max_link_speed="32.0 GT/s PCIe")
    made.gpu(f"{SWITCH}/0000:17:00.0/0000:18:00.0", cores="0-55,112-167")
    made.gpu(f"{SWITCH}/0000:17:01.0/0000:19:00.0", cores="0-55,112-167")
    made.gpu("pci0000:15/0000:15:03.0/0000:2a:00.0")
    made.gpu("pci0000:97/0000:97:01.0/0000:98:00.0", numa=1)
    made.rdma(f"{SWITCH}/0000:17:02.0/0000:1a:00.0", "mlx5_0")
    made.rdma(f"{SWITCH}/0000:17:03.0/0000:1b:00.0/0000:1c:00.0/0000:1d:00.0", "mlx5_1", layer="Ethernet")
    made.rdma("pci0000:a7/0000:a7:01.0/0000:a8:00.0", "efa_0", numa=1, layer="Unspecified")
    return made


def test_links_follow_from_the_common_bridges(sysfs: Sysfs) -> None:
    gpus = read_gpus(read_nics(sysfs.root / "class/infiniband"), sysfs.root)
    assert [gpu.name for gpu in gpus] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert gpus[0].links == {"GPU1": "PIX", "GPU2": "PHB", "GPU3": "SYS"}
    assert gpus[0].nics == {"efa_0": "SYS", "mlx5_0": "PIX", "mlx5_1": "PXB"}
    assert gpus[3].nics == {"efa_0": "NODE", "mlx5_0": "SYS", "mlx5_1": "SYS"}
    assert (gpus[0].cores, gpus[3].numa_node) == ("0-55,112-167", 1)


def test_kinds_of_nics_follow_from_port_and_driver(sysfs: Sysfs) -> None:
    driver = sysfs.root / "bus/pci/drivers/efa"
    driver.mkdir(parents=True)
    (sysfs.root / "class/infiniband/efa_0/device/driver").symlink_to(driver)
    kinds = {nic.name: nic.kind for nic in read_nics(sysfs.root / "class/infiniband")}
    assert kinds == {"efa_0": "efa", "mlx5_0": "infiniband", "mlx5_1": "roce"}


@pytest.mark.parametrize(
    ("above", "speed", "width", "gbit_per_s"),
    [
        ("32.0 GT/s PCIe", "32.0 GT/s PCIe", "16", 504.1),
        ("16.0 GT/s PCIe", "32.0 GT/s PCIe", "16", 252.1),
        ("32.0 GT/s PCIe", "8.0 GT/s PCIe", "8", 63.0),
        ("2.5 GT/s PCIe", "5.0 GT/s PCIe", "1", 2.0),
        ("Unknown", "Unknown", "16", None),
        ("32.0 GT/s PCIe", "32.0 GT/s PCIe", "63", None),
        ("32.0 GT/s PCIe", "32.0 GT/s PCIe", "0", None),
    ],
)
def test_a_pcie_link_has_the_speed_of_both_ends_and_the_lanes_in_use(
    tmp_path: Path, above: str, speed: str, width: str, gbit_per_s: float | None
) -> None:
    made = Sysfs(tmp_path)
    made.device("pci0000:00/0000:00:01.0", max_link_speed=above)
    made.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", speed=speed, width=width)
    assert [gpu.pcie_gbit_per_s for gpu in read_gpus(root=tmp_path)] == [gbit_per_s]


def test_facts_from_pci_are_added_to_the_matrix(sysfs: Sysfs) -> None:
    pci = read_gpus(root=sysfs.root)
    matrix = [FoundGpu(f"GPU{number}", {}, {"mlx5_0": "NODE"}, cores="4-5", numa_node=None) for number in range(4)]
    completed = add_pci_facts(matrix, pci)
    assert (completed[3].numa_node, completed[0].cores, completed[0].nics) == (1, "4-5", {"mlx5_0": "NODE"})
    assert [gpu.pcie_gbit_per_s for gpu in completed] == [504.1] * 4
    assert add_pci_facts(matrix[:2], pci) == matrix[:2], "a container shows fewer GPUs than PCI"


def test_numa_nodes_with_cores_are_listed(tmp_path: Path) -> None:
    made = Sysfs(tmp_path)
    for number, cores in ((10, "8-15"), (2, "0-7"), (3, "")):
        made.numa(number, cores)
    assert read_numa_nodes(tmp_path) == [
        NumaNode(2, "0-7", 131596668 * 1024),
        NumaNode(10, "8-15", 131596668 * 1024),
    ]
    assert read_numa_nodes(tmp_path / "nothing") == []


# The network


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


def test_nics_are_shown_with_the_key_for_their_rate(tmp_path: Path) -> None:
    for number in range(4):
        make_nic(tmp_path, f"mlx5_{number}", "400 Gb/sec (4X NDR)", str(number // 2))
    (check,) = check_nics(8, tmp_path)
    assert (check.name, check.status) == ("nics", "ok")
    assert "4 NICs" in check.found and "1600 Gbit/s" in check.found and "cluster.nic_gbit_per_s=200" in check.found
    assert list(check_nics(8, tmp_path / "nothing")) == []


def test_different_rates_are_a_warning(tmp_path: Path) -> None:
    make_nic(tmp_path, "mlx5_0", "400 Gb/sec (4X NDR)")
    make_nic(tmp_path, "mlx5_1", "100 Gb/sec (4X EDR)")
    [check] = check_nics(8, tmp_path)
    assert check.status == "warn" and "mlx5_0 400, mlx5_1 100" in check.found


def test_real_interfaces_that_are_up_are_read(tmp_path: Path) -> None:
    """A bond replaces its interfaces; an unknown speed is -1 or unreadable."""
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
