"""A made-up /sys of a node with GPUs and NICs, in the formats of the kernel's own files."""

from __future__ import annotations

from pathlib import Path


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def link(name: Path, target: Path) -> None:
    name.parent.mkdir(parents=True, exist_ok=True)
    name.symlink_to(target)


class Sysfs:
    def __init__(self, root: Path):
        self.root = root

    def device(self, path: str, **files: str) -> Path:
        """Add a PCI device below the bridges of `path`: `pci0000:15/0000:15:01.0/0000:16:00.0`."""
        folder = write(self.root / "devices" / path, **files)
        if not (entry := self.root / "bus/pci/devices" / folder.name).exists():
            link(entry, folder)
        return folder

    def gpu(
        self, path: str, numa: int = 0, cores: str = "0-7", speed: str = "32.0 GT/s PCIe", width: str = "16"
    ) -> None:
        ids = {"vendor": "0x10de", "class": "0x030200"}
        place = {"numa_node": str(numa), "local_cpulist": cores}
        self.device(
            path, **ids, **place, max_link_speed=speed, current_link_speed="2.5 GT/s PCIe", current_link_width=width
        )

    def rdma(
        self, path: str, name: str, rate: str = "400 Gb/sec (4X NDR)", numa: int = 0, layer: str = "InfiniBand"
    ) -> None:
        device = self.device(path, vendor="0x15b3", **{"class": "0x020700"}, numa_node=str(numa))
        entry = device / "infiniband" / name
        write(entry / "ports/1", rate=rate, state="4: ACTIVE", link_layer=layer)
        link(entry / "device", device)
        link(self.root / "class/infiniband" / name, entry)

    def interface(self, name: str, speed: str, state: str = "up", path: str = "") -> Path:
        """A virtual one without `path`."""
        place = self.device(path) / "net" if path else self.root / "devices/virtual/net"
        entry = write(place / name, speed=speed, operstate=state)
        if path:
            link(entry / "device", place.parent)
        link(self.root / "class/net" / name, entry)
        return entry

    def numa(self, number: int, cores: str, total_kb: int = 131596668) -> None:
        meminfo = f"Node {number} MemTotal:       {total_kb} kB\nNode {number} MemFree:        1024 kB"
        write(self.root / f"devices/system/node/node{number}", cpulist=cores, meminfo=meminfo, distance="10 21")
