"""Discover the fabric of this machine, or of the machine that given outputs describe."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.doctor.fabric.gpu_matrix import COMMAND, parse_matrix
from trainspec_cli.doctor.fabric.sysfs import SYS, complete, describe_gpus, read_gpus, read_numa_nodes
from trainspec_cli.doctor.fabric.tiers import Network, network_of, network_tiers, node_tiers, rails, with_measured
from trainspec_cli.doctor.measured_fabric import EFFICIENCY, hosts_of
from trainspec_cli.doctor.network import read_interfaces, read_nics
from trainspec_cli.doctor.switches import SwitchLevel, read_levels
from trainspec_cli.errors import MachineError, Problem
from trainspec_cli.launcher.job.machine import usable_cores
from trainspec_cli.launcher.slurm import commands as slurm
from trainspec_cli.node import node_name
from trainspec_cli.spec.results.fabric import FabricFact, FoundFabric, FoundGpu, Nic, NumaNode
from trainspec_cli.spec.results.tools import PairRate
from trainspec_cli.units import format_bytes

TIMEOUT_S = 60.0
"""nvidia-smi initialises every GPU of the node, which takes seconds where no driver process stays."""
SCONTROL = "scontrol show topology"


@dataclass(frozen=True)
class Told:
    """Holds the text of a command or file, and its name."""

    text: str
    source: str
    problem: str = ""
    """Why a command said nothing."""


@dataclass(frozen=True)
class NodeLinks:
    """Holds what was found inside a node."""

    name: str
    gpus: tuple[FoundGpu, ...]
    gpus_source: str
    nics: tuple[Nic, ...] = ()
    interfaces: tuple[Nic, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    nics_source: str = "/sys/class"
    remarks: tuple[str, ...] = ()


def discover(
    node: NodeLinks,
    topology: Told,
    measured: tuple[Sequence[PairRate], str] | None = None,
    devices_per_node: int | None = None,
    scaleup_devices: int | None = None,
) -> FoundFabric:
    """Return the fabric that a node, Slurm's topology and measured links make together.

    `scaleup_devices`, where it is given, are joined by the fast links: Slurm's levels within them are no tiers.
    """
    devices = devices_per_node or len(node.gpus) or min(2, usable_cores())
    inside, remarks = node_tiers(node.gpus, node.gpus_source, devices)
    network = network_of(node.gpus, node.nics, node.interfaces, devices, node.nics_source)
    levels = read_levels(topology.text)
    if scaleup_devices:
        levels = [level for level in levels if level.most_nodes * devices > scaleup_devices]
    between = network_tiers(network, levels, topology.source, devices)
    facts = [*_node_facts(node, network), _switches_fact(levels, topology)]
    if measured:
        pairs, source = measured
        strangers = _strangers(pairs, levels)
        if strangers:
            remarks.append(f"{', '.join(strangers)} of {source} are not among Slurm's nodes: its rates are left out")
        else:
            between = with_measured(between, pairs, levels, source, devices, network.rdma_nics)
            remarks.append(f"measured rates are what collectives reach: plan with '{EFFICIENCY}'")
        facts.append(FabricFact("measured", f"{len(pairs)} links between {len(hosts_of(pairs))} nodes", source))
    if devices_per_node and node.gpus and devices_per_node != len(node.gpus):
        remarks.append(f"cluster.devices_per_node is {devices_per_node}, and {len(node.gpus)} GPUs were found")
    return FoundFabric(
        host=node.name,
        devices_per_node=devices,
        tiers=(*inside, *between),
        facts=tuple(facts),
        gpus=node.gpus,
        nics=(*node.nics, *node.interfaces),
        numa_nodes=node.numa_nodes,
        remarks=(*node.remarks, *remarks),
    )


def _strangers(pairs: Sequence[PairRate], levels: Sequence[SwitchLevel]) -> list[str]:
    """Return the measured nodes that Slurm's levels do not hold; none where there are no levels to go by."""
    if len(levels) < 2:
        return []
    known = {node for element in levels[-1].elements for node in element}
    return [host for host in hosts_of(pairs) if host not in known]


# Sources


def links_of_file(told: Told) -> NodeLinks:
    """Return the links of the node whose matrix was saved; its NICs' rates do not stand in it. Raises MachineError."""
    return NodeLinks(
        f"the node of {told.source}", tuple(parse_matrix(told.text, told.source)), told.source, nics_source=told.source
    )


def links_here(root: Path = SYS) -> NodeLinks:
    """Return the links of this node, by the kernel and, where there is one, by nvidia-smi."""
    nics, interfaces = read_nics(root / "class/infiniband"), read_interfaces(root / "class/net")
    pci = read_gpus(root)
    gpus, source, remarks = describe_gpus(pci, nics), "/sys/bus/pci/devices", []
    try:
        told = run_nvidia_smi()
        if told:
            gpus, source = complete(parse_matrix(told.text, told.source), pci), told.source
        elif pci:
            remarks.append("there is no nvidia-smi on this node: NVLink is not seen")
    except MachineError as error:
        remarks.append(f"{error.problems[0].message}: NVLink is not seen")
    return NodeLinks(
        node_name(),
        tuple(gpus),
        source,
        tuple(nics),
        tuple(interfaces),
        tuple(read_numa_nodes(root)),
        remarks=tuple(remarks),
    )


def run_nvidia_smi() -> Told | None:
    """Return its matrix; None where there is no nvidia-smi. Raises MachineError where it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            COMMAND.split(), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"{COMMAND} has not answered for {TIMEOUT_S:g} s"
        raise MachineError(Problem("nvidia_smi", message, hint="dmesg | grep NVRM", environment=True)) from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise MachineError(Problem("nvidia_smi", f"{COMMAND} failed: {said}", hint="nvidia-smi", environment=True))
    return Told(done.stdout, COMMAND)


def topology_here() -> Told:
    """Return what Slurm says of its switches, or why it says nothing."""
    try:
        return Told(slurm.show_topology(), SCONTROL)
    except MachineError as error:
        return Told("", SCONTROL, error.problems[0].message.splitlines()[0])


# Facts


def _node_facts(node: NodeLinks, network: Network) -> Iterator[FabricFact]:
    yield FabricFact("gpus", describe_links(node.gpus), node.gpus_source)
    if chosen := rails(node.gpus, {nic for gpu in node.gpus for nic in gpu.nics}):
        beside = ", ".join(f"{gpu} {'+'.join(names)}" for gpu, names in chosen.items())
        yield FabricFact("rails", beside, node.gpus_source)
    yield FabricFact("nics", network.found, network.source)
    if node.numa_nodes:
        each = "; ".join(_numa_node(one, node.gpus) for one in node.numa_nodes)
        yield FabricFact("numa", each, "/sys/devices/system/node")


def describe_links(gpus: Sequence[FoundGpu]) -> str:
    """Return the links between GPUs, the most frequent one first: `8: NV18 between 28 pairs`."""
    if not gpus:
        return "none"
    pairs = [link for place, gpu in enumerate(gpus) for link in _links_to(gpu, gpus[place + 1 :])]
    count = {link: pairs.count(link) for link in dict.fromkeys(pairs)}
    links = ", ".join(f"{link} between {number}" for link, number in sorted(count.items(), key=lambda one: -one[1]))
    return f"{len(gpus)}: {links} pair{'s' * (len(pairs) > 1)}" if pairs else str(len(gpus))


def _links_to(gpu: FoundGpu, others: Sequence[FoundGpu]) -> list[str]:
    return [gpu.links.get(other.name, "?") for other in others]


def _numa_node(node: NumaNode, gpus: Sequence[FoundGpu]) -> str:
    beside = [gpu.name for gpu in gpus if gpu.numa_node == node.number]
    memory = f", {format_bytes(node.memory_bytes)}" if node.memory_bytes else ""
    return f"{node.number}: cores {node.cores}{memory}{', ' + ' '.join(beside) if beside else ''}"


def _switches_fact(levels: Sequence[SwitchLevel], topology: Told) -> FabricFact:
    if topology.problem:
        return FabricFact("switches", f"not known: {topology.problem}", topology.source)
    if not levels:
        return FabricFact("switches", "Slurm knows none that join nodes", topology.source)
    each = ", ".join(f"{len(level.elements)} {level.name} of up to {level.most_nodes:,} nodes" for level in levels)
    return FabricFact("switches", each, topology.source)
