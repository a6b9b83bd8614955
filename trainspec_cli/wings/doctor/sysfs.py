"""Read this node's NICs, interfaces, GPUs, PCIe links and NUMA nodes from the kernel (/sys)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from trainspec_cli.recipe.keys.cluster import NetworkKind
from trainspec_cli.wings.doctor.found_fabric import FoundGpu, Nic, NumaNode

SYS = Path("/sys")
_SPEED = re.compile(r"([\d.]+) GT/s")
_MEMORY = re.compile(r"MemTotal:\s+(\d+) kB")
GPU_VENDORS = ("0x10de", "0x1002")
"""PCI vendor ids of NVIDIA and AMD."""
GPU_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")
"""PCI classes: VGA and 3D controllers, other displays, and processing accelerators."""
CODING = {2.5: 8 / 10, 5.0: 8 / 10, 8.0: 128 / 130, 16.0: 128 / 130, 32.0: 128 / 130, 64.0: 242 / 256}
"""Gigatransfers per second per PCIe lane -> the fraction of transfers that carry data (PCI Express Base Specification 1
to 6)."""
MAX_LANES = 32

# Network

INFINIBAND = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_KIND_OF_DRIVER: dict[str, NetworkKind] = {"efa": "efa", "hfi1": "omnipath"}
"""Drivers whose link_layer does not reveal the kind of network, because it is Unspecified or InfiniBand."""


def read_nics(folder: Path = INFINIBAND) -> list[Nic]:
    """Return the RDMA NICs with an active port, by name. `folder` has the layout of the kernel's folder."""
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in sysfs_text(port / "state")]
        rates = [float(rate[1]) for port in ports if (rate := _RATE.search(sysfs_text(port / "rate")))]
        if rates:
            where = device / "device"
            kind = _KIND_OF_DRIVER.get((where / "driver").resolve().name, "infiniband")
            if kind == "infiniband" and any(sysfs_text(port / "link_layer") == "Ethernet" for port in ports):
                kind = "roce"
            found.append(Nic(device.name, sum(rates), _numa_node(where), kind, pci_path(where)))
    return found


def read_interfaces(folder: Path = INTERFACES) -> list[Nic]:
    """Return the network interfaces that are up: devices and bonds, but no virtual interfaces."""
    found = []
    for interface in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_real = (interface / "device").exists() or (interface / "bonding").is_dir()
        if is_real and not (interface / "master").exists() and sysfs_text(interface / "operstate") == "up":
            mbit = sysfs_text(interface / "speed")  # a virtual NIC's speed is -1 or unreadable
            rate = int(mbit) / 1000 if mbit.isdigit() and mbit != "0" else None
            where = interface / "device"
            found.append(Nic(interface.name, rate, _numa_node(where), "ethernet", pci_path(where)))
    return found


def _numa_node(device: Path) -> int | None:
    text = sysfs_text(device / "numa_node")
    return int(text) if text.isdigit() else None  # the value is -1 if there are no NUMA nodes


def pci_path(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses from the host bridge to a device in /sys; empty if it is not a PCI device."""
    return tuple(part for part in device.resolve().parts if _PCI.fullmatch(part))


def sysfs_text(path: Path) -> str:
    """Return the content of a file in /sys without the newline; "" if it is missing or unreadable."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# GPUs and their links


def read_gpus(nics: Sequence[Nic] = (), root: Path = SYS) -> list[FoundGpu]:
    """Return the GPUs in PCI address order, as nvidia-smi numbers them. Their links are those visible in PCI without a
    driver, so NVLink is missing."""
    folders: dict[str, Path] = {}
    for folder in sorted((root / "bus/pci/devices").glob("*")):
        if sysfs_text(folder / "vendor") in GPU_VENDORS and sysfs_text(folder / "class")[:6] in GPU_CLASSES:
            folders[f"GPU{len(folders)}"] = folder
    locations = {name: (pci_path(folder), _numa_node(folder)) for name, folder in folders.items()}
    found = []
    for name, folder in folders.items():
        here = locations[name]
        links = {other: _link(here, there) for other, there in locations.items() if other != name}
        nic_links = {nic.name: _link(here, (nic.pci_path, nic.numa_node)) for nic in nics if nic.pci_path}
        cores = sysfs_text(folder / "local_cpulist")
        # The link's rate is that of the lanes in use, at the highest speed that both ends support. An idle GPU lowers
        # its current speed, but not the number of lanes.
        ends = (folder, folder.resolve().parent)
        speeds = [float(speed[1]) for end in ends if (speed := _SPEED.match(sysfs_text(end / "max_link_speed")))]
        lanes = sysfs_text(folder / "current_link_width")
        rate = None
        if speeds and lanes.isdigit() and 0 < int(lanes) <= MAX_LANES and min(speeds) in CODING:
            rate = round(min(speeds) * CODING[min(speeds)] * int(lanes), 1)
        found.append(FoundGpu(name, links, nic_links, cores, here[1], rate))
    return found


PciLocation = tuple[Sequence[str], int | None]
"""A device's NUMA node, and the PCI addresses from the host bridge to it."""


def _link(here: PciLocation, there: PciLocation) -> str:
    """Return the link between two PCI devices, named as in `nvidia-smi topo -m`."""
    path, numa_node = here
    far_path, far_numa_node = there
    shared = next(
        (index for index, (one, other) in enumerate(zip(path, far_path, strict=False)) if one != other),
        min(len(path), len(far_path)),
    )
    if shared == 0:
        return "NODE" if numa_node == far_numa_node else "SYS"
    if shared == 1:
        return "PHB"
    below_switch = max(len(path), len(far_path)) - shared  # a switch port and the device
    return "PIX" if below_switch <= 2 else "PXB"


def add_pci_facts(matrix: Sequence[FoundGpu], found: Sequence[FoundGpu]) -> list[FoundGpu]:
    """Add the information from PCI to the GPUs in the matrix, if both show the same number of GPUs."""
    if len(matrix) != len(found):
        return list(matrix)
    return [
        replace(
            gpu,
            cores=gpu.cores or pci.cores,
            numa_node=pci.numa_node if gpu.numa_node is None else gpu.numa_node,
            pcie_gbit_per_s=pci.pcie_gbit_per_s,
        )
        for gpu, pci in zip(matrix, found, strict=True)
    ]


def read_numa_nodes(root: Path = SYS) -> list[NumaNode]:
    """Return the NUMA nodes with cores, by number."""
    folders = (root / "devices/system/node").glob("node[0-9]*")
    found = []
    for number, folder in sorted((int(folder.name.removeprefix("node")), folder) for folder in folders):
        if cores := sysfs_text(folder / "cpulist"):
            memory = _MEMORY.search(sysfs_text(folder / "meminfo"))
            found.append(NumaNode(number, cores, int(memory[1]) * 1024 if memory else None))
    return found
