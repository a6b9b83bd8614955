"""Discover the fabric of this machine, or of the machine that given outputs describe, and write it as a group's option.

The links inside a node stand in the matrix that `nvidia-smi topo -m` prints: how each GPU reaches the others and the
NICs of its node. Its columns changed over the years: NICs stand there by name (drivers up to 4xx) or as NIC0 with a
legend below, and the affinity to cores may be followed by those to NUMA nodes, or be blank where a job was given other
cores.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.node import node_name
from trainspec_cli.core.printable import format_bytes, printable
from trainspec_cli.recipe.results.tools import PairRate
from trainspec_cli.run.job.machine import usable_cores
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.wings.doctor.found_fabric import FabricFact, FoundFabric, FoundGpu, FoundTier, Nic, NumaNode
from trainspec_cli.wings.doctor.switches import read_levels
from trainspec_cli.wings.doctor.sysfs import (
    SYS,
    complete,
    read_gpus,
    read_interfaces,
    read_nics,
    read_numa_nodes,
)
from trainspec_cli.wings.doctor.tiers import (
    EFFICIENCY,
    hosts_of,
    network_of,
    network_tiers,
    node_tiers,
    rails,
    with_measured,
)

TIMEOUT_S = 60.0
"""nvidia-smi initialises every GPU of the node, which takes seconds where no driver process stays."""
SCONTROL = "scontrol show topology"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+): (\S+)\s*")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
SELF = "X"
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
RENAMED = {"SOC": "SYS"}
"""The names of drivers before 384 -> those of today."""
COMMAND = "nvidia-smi topo -m"
WIDTH = 118
SCHEMA = "# yaml-language-server: $schema=../schema/fabric.json"
WIRING = "rails, where NIC i of every node is on a switch of its own; one_switch, where a node's NICs are on one"


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
    facts = [FabricFact("gpus", describe_links(node.gpus), node.gpus_source)]
    if chosen := rails(node.gpus, {nic for gpu in node.gpus for nic in gpu.nics}):
        beside = ", ".join(f"{gpu} {'+'.join(names)}" for gpu, names in chosen.items())
        facts.append(FabricFact("rails", beside, node.gpus_source))
    facts.append(FabricFact("nics", network.found, network.source))
    if node.numa_nodes:
        each = "; ".join(_numa_node(one, node.gpus) for one in node.numa_nodes)
        facts.append(FabricFact("numa", each, "/sys/devices/system/node"))
    switches = "Slurm knows none that join nodes"
    if topology.problem:
        switches = f"not known: {topology.problem}"
    elif levels:
        sizes = (f"{len(level.elements)} {level.name} of up to {level.most_nodes:,} nodes" for level in levels)
        switches = ", ".join(sizes)
    facts.append(FabricFact("switches", switches, topology.source))
    if measured:
        pairs, source = measured
        strangers = []
        if len(levels) >= 2:  # else there are none to go by
            known = {node for element in levels[-1].elements for node in element}
            strangers = [host for host in hosts_of(pairs) if host not in known]
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


# Sources


def links_here(root: Path = SYS) -> NodeLinks:
    """Return the links of this node, by the kernel and, where there is one, by nvidia-smi."""
    nics = read_nics(root / "class/infiniband")
    interfaces = read_interfaces(root / "class/net")
    pci = read_gpus(nics, root)
    gpus = pci
    source = "/sys/bus/pci/devices"
    remarks = []
    try:
        told = run_nvidia_smi()
        if told:
            gpus = complete(parse_matrix(told.text, told.source), pci)
            source = told.source
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


def describe_links(gpus: Sequence[FoundGpu]) -> str:
    """Return the links between GPUs, the most frequent one first: `8: NV18 between 28 pairs`."""
    if not gpus:
        return "none"
    pairs = [
        link
        for place, gpu in enumerate(gpus)
        for link in (gpu.links.get(other.name, "?") for other in gpus[place + 1 :])
    ]
    count = {link: pairs.count(link) for link in dict.fromkeys(pairs)}
    links = ", ".join(f"{link} between {number}" for link, number in sorted(count.items(), key=lambda one: -one[1]))
    return f"{len(gpus)}: {links} pair{'s' * (len(pairs) > 1)}" if pairs else str(len(gpus))


def _numa_node(node: NumaNode, gpus: Sequence[FoundGpu]) -> str:
    beside = [gpu.name for gpu in gpus if gpu.numa_node == node.number]
    memory = f", {format_bytes(node.memory_bytes)}" if node.memory_bytes else ""
    return f"{node.number}: cores {node.cores}{memory}{', ' + ' '.join(beside) if beside else ''}"


# The matrix of nvidia-smi


def parse_matrix(text: str, source: str) -> list[FoundGpu]:
    """Return the GPUs of a node with their links. Raises MachineError that names `source` and the line.

    Lines that do not belong to the matrix are passed over, so that a report may be given which holds it.
    """
    lines = _COLOUR.sub("", text).splitlines()
    place = None
    for number, line in enumerate(lines):
        words = line.split()
        # The names of the columns begin with GPU0, as the first row does, which goes on with a link.
        if words[:1] == ["GPU0"] and not (len(words) > 1 and _LINK.fullmatch(words[1])):
            place = number
            break
    if place is None:
        hint = f"give what `{COMMAND}` prints, whole: {COMMAND} > topology.txt"
        raise MachineError(Problem("no_matrix", f"{source} holds no matrix of GPUs", hint=hint, environment=True))
    columns, affinities = _columns(lines[place])
    names = {match[1]: match[2] for line in lines[place:] if (match := _LEGEND.fullmatch(line))}
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[place + 1 :], place + 2):
        words = line.split()
        if words and words[0] in columns and words[0] not in rows:
            rows[words[0]] = _row(words[1:], columns, f"{source}:{number}", words[0])
        elif words and rows:
            break
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        message = f"the matrix in {source} has a column and no row of {', '.join(missing)}"
        raise MachineError(Problem("no_matrix", message, hint=f"give what `{COMMAND}` prints, whole", environment=True))
    found = []
    for gpu in gpus:
        row = rows[gpu]
        links = {other: RENAMED.get(link, link) for other, link in zip(columns, row, strict=False) if other != gpu}
        # The cores may be blank, the others are not: they are told apart from the end.
        behind = dict(zip(reversed(affinities), reversed(row[len(columns) :]), strict=False))
        cores = behind.get("CPU Affinity", "")
        numa = behind.get("NUMA Affinity", "")
        found.append(
            FoundGpu(
                gpu,
                links={other: link for other, link in links.items() if _GPU.fullmatch(other)},
                nics={names.get(other, other): link for other, link in links.items() if not _GPU.fullmatch(other)},
                cores=cores if _CORES.fullmatch(cores) else "",
                numa_node=int(numa) if numa.isdigit() else None,
            )
        )
    return found


def _columns(header: str) -> tuple[list[str], list[str]]:
    """Return the devices, and the affinities behind them."""
    affinities = [name for name in _AFFINITIES if name in header]
    devices = header.partition(_AFFINITIES[0])[0]
    return devices.split(), affinities


def _row(cells: list[str], columns: Sequence[str], where: str, name: str) -> list[str]:
    links = cells[: len(columns)]
    wrong = next((cell for cell in links if not _LINK.fullmatch(cell)), None)
    if wrong is None and len(links) == len(columns):
        return cells
    found = f"`{wrong}`, which is no link" if wrong is not None else f"{len(links)} links"
    message = f"{where}: the row of {name} has {found}; {len(columns)} are needed, such as NV18, PIX, PXB, NODE or SYS"
    raise MachineError(
        Problem("bad_matrix", message, hint=f"give what `{COMMAND}` prints, unchanged", environment=True)
    )


# The file of the group


def render_group(found: FoundFabric, name: str, *, has_schema: bool) -> str:
    """Return the YAML of conf/fabric/NAME.yaml; `has_schema` says that the schemas lie beside the group."""
    lines = ["# @package cluster.fabric", *([SCHEMA] if has_schema else [])]
    lines += _comment(f"The fabric of {found.host}, found by `trainspec fabric`. Keys with ... were not found.")
    lines += [line for remark in found.remarks for line in _comment(f"Note: {remark}.")]
    lines += [f"name: {json.dumps(name, allow_nan=False)}", "tiers:"]
    for tier in found.tiers:
        lines += _tier(tier)
    lines += [*_comment(f"nic_wiring: {WIRING}; a node does not show it."), "nic_wiring: null", "planes: null"]
    lines += ["nccl_tuner: false", "sources:"]
    lines += [f"  {key}: {json.dumps(source, allow_nan=False)}" for key, source in found.spec(name).sources.items()]
    return "\n".join(lines) + "\n"


def _tier(tier: FoundTier) -> Iterator[str]:
    spec = tier.spec
    yield f"  - name: {json.dumps(spec.name, allow_nan=False)}"
    if spec.devices is not None:
        yield f"    devices: {spec.devices}"
    if spec.gbit_per_s is not None:
        yield f"    gbit_per_s: {spec.gbit_per_s:g}"
    if spec.latency_us is not None:
        yield f"    latency_us: {spec.latency_us:g}"
    if spec.kind is not None:
        yield f"    kind: {spec.kind}"
    for key, advice in tier.left_out.items():
        yield from _comment(f"{key}: ...  {advice}", "    # ")


def _comment(text: str, margin: str = "# ") -> list[str]:
    words = printable(" ".join(text.split()))
    return textwrap.wrap(words, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
