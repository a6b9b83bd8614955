"""Read what this node and Slurm show of the network: NICs with rate and NUMA node, and the switches above."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from trainspec_cli.spec.results.doctor import Check

INFINIBAND = Path("/sys/class/infiniband")
_RATE = re.compile(r"([\d.]+) Gb/sec")
_HOSTS = re.compile(r"[^,\[\]]+(?:\[([^\]]*)\][^,\[]*)?")
_SWITCH = re.compile(r"^SwitchName=(\S+)\s+Level=(\d+)\b.*?\bNodes=(\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Nic:
    name: str
    gbit_per_s: float
    """Of its active ports together."""
    numa_node: int | None
    """None where the system does not say."""


def read_nics(folder: Path = INFINIBAND) -> list[Nic]:
    """Return the NICs for RDMA that have an active port, by name; `folder` as the kernel lays it out."""
    found = []
    for device in sorted(folder.iterdir()) if folder.is_dir() else ():
        ports = [port for port in device.glob("ports/*") if "ACTIVE" in _text(port / "state")]
        rates = [float(rate[1]) for port in ports if (rate := _RATE.search(_text(port / "rate")))]
        if rates:
            found.append(Nic(device.name, sum(rates), _numa_node(_text(device / "device" / "numa_node"))))
    return found


def _numa_node(text: str) -> int | None:
    return int(text) if text.isdigit() else None  # the kernel says -1 where there is none


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def check_nics(devices: int, folder: Path = INFINIBAND) -> Iterator[Check]:
    """Say what they make for each of `devices`; nothing where there is no such NIC."""
    nics = read_nics(folder)
    if not nics:
        return
    together = sum(nic.gbit_per_s for nic in nics)
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


def nodes_below_switches(topology: str) -> list[int]:
    """Return the most nodes below one switch of each level, leaves first, from `scontrol show topology`."""
    most: dict[int, int] = {}
    for _, level, nodes in _SWITCH.findall(topology):
        most[int(level)] = max(most.get(int(level), 0), count_hosts(nodes))
    return [most[level] for level in sorted(most)]


def count_hosts(hosts: str) -> int:
    """Count the names of a Slurm host list: `gpu[001-004,7],login` has six."""
    return sum(_count_ranges(ranges) for ranges in _HOSTS.findall(hosts))


def _count_ranges(ranges: str) -> int:
    if not ranges:
        return 1
    bounds = (part.partition("-") for part in ranges.split(","))
    return sum(int(last or first) - int(first) + 1 for first, _, last in bounds)


def check_switches(topology: str, devices_per_node: int) -> Iterator[Check]:
    """Say what tiers Slurm's switches would be; nothing where it knows none, or one above all nodes."""
    levels = _growing(nodes_below_switches(topology))
    if len(levels) < 2:
        return
    nodes = ", ".join(f"{number:,}" for number in levels)
    middle = ",".join(f"{{name: level{level},devices: {n * devices_per_node}}}" for level, n in enumerate(levels[:-1]))
    tiers = f"cluster.fabric.tiers=[{{name: domain}},{middle},{{name: top}}]"
    yield Check("switches", "ok", f"Slurm's switches have up to {nodes} nodes below them, by level: {tiers}")


def _growing(levels: Sequence[int]) -> list[int]:
    """A level with no more nodes than the one below joins nothing."""
    return [*levels[:1], *(above for below, above in pairwise(levels) if above > below)]
