"""Read what the kernel shows of this node's network: NICs with rate, kind and place, and interfaces for TCP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainspec_cli.spec.recipe.fabric import NetworkKind
from trainspec_cli.spec.results.doctor import Check
from trainspec_cli.spec.results.fabric import Nic

INFINIBAND = Path("/sys/class/infiniband")
INTERFACES = Path("/sys/class/net")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_PCI = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}|[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_KIND_OF_DRIVER: dict[str, NetworkKind] = {"efa": "efa", "hfi1": "omnipath"}
"""Drivers whose ports do not say their kind: link_layer is Unspecified, or InfiniBand."""


def read_nics(folder: Path = INFINIBAND) -> list[Nic]:
    """Return the NICs for RDMA that have an active port, by name; `folder` as the kernel lays it out."""
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in own_text(port / "state")]
        rates = [float(rate[1]) for port in ports if (rate := _RATE.search(own_text(port / "rate")))]
        if rates:
            where = device / "device"
            found.append(Nic(device.name, sum(rates), _numa_node(where), _kind(device, ports), pci_path(where)))
    return found


def _kind(device: Path, ports: Sequence[Path]) -> NetworkKind:
    driver = _KIND_OF_DRIVER.get((device / "device" / "driver").resolve().name)
    return driver or ("roce" if any(own_text(port / "link_layer") == "Ethernet" for port in ports) else "infiniband")


def read_interfaces(folder: Path = INTERFACES) -> list[Nic]:
    """Return the network interfaces that are up and belong to a device, or bond several; no virtual ones."""
    found = []
    for interface in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_real = (interface / "device").exists() or (interface / "bonding").is_dir()
        if is_real and not (interface / "master").exists() and own_text(interface / "operstate") == "up":
            mbit = own_text(interface / "speed")  # of a virtual NIC the kernel says -1, or refuses to say
            rate = int(mbit) / 1000 if mbit.isdigit() and mbit != "0" else None
            where = interface / "device"
            found.append(Nic(interface.name, rate, _numa_node(where), "ethernet", pci_path(where)))
    return found


def _numa_node(device: Path) -> int | None:
    text = own_text(device / "numa_node")
    return int(text) if text.isdigit() else None  # the kernel says -1 where there is none


def pci_path(device: Path) -> tuple[str, ...]:
    """Return the PCI addresses from the host bridge down to a device of /sys; empty for one that is not on PCI."""
    return tuple(part for part in device.resolve().parts if _PCI.fullmatch(part))


def own_text(path: Path) -> str:
    """Return what a file of /sys says, without the line's end; "" where there is none, or it refuses."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def check_nics(devices: int, folder: Path = INFINIBAND) -> Iterator[Check]:
    """Say what they make for each of `devices`; nothing where there is no such NIC."""
    nics = read_nics(folder)
    if not nics:
        return
    together = sum(nic.gbit_per_s or 0.0 for nic in nics)
    places = sorted({nic.numa_node for nic in nics if nic.numa_node is not None})
    where = f" on NUMA node{'s' * (len(places) > 1)} {', '.join(map(str, places))}" if places else ""
    found = f"{len(nics)} NIC{'s' * (len(nics) > 1)}{where}, {together:g} Gbit/s together"
    if len({nic.gbit_per_s for nic in nics}) > 1:
        rates = ", ".join(f"{nic.name} {nic.gbit_per_s:g}" for nic in nics)
        yield Check(
            "nics", "warn", f"{found}, of different rates: {rates}", "traffic striped over them goes at the least"
        )
    else:
        yield Check("nics", "ok", f"{found}; for {devices} devices cluster.nic_gbit_per_s={together / devices:g}")
