"""GPUs, PCIe and NUMA nodes as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.sysfs import Sysfs

from trainspec_cli.wings.doctor.found_fabric import FoundGpu, NumaNode
from trainspec_cli.wings.doctor.sysfs import complete, read_gpus, read_nics, read_numa_nodes

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


def test_links_follow_from_the_bridges_above(sysfs: Sysfs) -> None:
    gpus = read_gpus(read_nics(sysfs.root / "class/infiniband"), sysfs.root)
    assert [gpu.name for gpu in gpus] == ["GPU0", "GPU1", "GPU2", "GPU3"]
    assert gpus[0].links == {"GPU1": "PIX", "GPU2": "PHB", "GPU3": "SYS"}
    assert gpus[0].nics == {"efa_0": "SYS", "mlx5_0": "PIX", "mlx5_1": "PXB"}
    assert gpus[3].nics == {"efa_0": "NODE", "mlx5_0": "SYS", "mlx5_1": "SYS"}
    assert (gpus[0].cores, gpus[3].numa_node) == ("0-55,112-167", 1)


def test_kinds_of_nics_are_told_by_port_and_driver(sysfs: Sysfs) -> None:
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
def test_a_pcie_link_carries_what_both_ends_can_over_the_lanes_in_use(
    tmp_path: Path, above: str, speed: str, width: str, gbit_per_s: float | None
) -> None:
    made = Sysfs(tmp_path)
    made.device("pci0000:00/0000:00:01.0", max_link_speed=above)
    made.gpu("pci0000:00/0000:00:01.0/0000:01:00.0", speed=speed, width=width)
    assert [gpu.pcie_gbit_per_s for gpu in read_gpus(root=tmp_path)] == [gbit_per_s]


def test_what_pci_knows_is_added_to_the_matrix(sysfs: Sysfs) -> None:
    pci = read_gpus(root=sysfs.root)
    matrix = [FoundGpu(f"GPU{number}", {}, {"mlx5_0": "NODE"}, cores="4-5", numa_node=None) for number in range(4)]
    whole = complete(matrix, pci)
    assert (whole[3].numa_node, whole[0].cores, whole[0].nics) == (1, "4-5", {"mlx5_0": "NODE"})
    assert [gpu.pcie_gbit_per_s for gpu in whole] == [504.1] * 4
    assert complete(matrix[:2], pci) == matrix[:2], "a container shows fewer GPUs than PCI"


def test_numa_nodes_with_cores_are_listed(tmp_path: Path) -> None:
    made = Sysfs(tmp_path)
    for number, cores in ((10, "8-15"), (2, "0-7"), (3, "")):
        made.numa(number, cores)
    assert read_numa_nodes(tmp_path) == [
        NumaNode(2, "0-7", 131596668 * 1024),
        NumaNode(10, "8-15", 131596668 * 1024),
    ]
    assert read_numa_nodes(tmp_path / "nothing") == []
