"""Discover the fabric of this machine, or of a machine described by saved command outputs, and write it as an option
file.

`nvidia-smi topo -m` prints the links inside a node as a matrix of GPUs and NICs. The columns depend on the driver: NICs
appear by name (drivers up to 4xx), or as NIC0 with a legend below. The NUMA affinity may follow the CPU affinity. The
CPU affinity may be blank in a job that was allocated other cores."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.node import node_name
from trainspec_cli.core.printable import format_bytes, printable
from trainspec_cli.recipe.results.tools import PairRate
from trainspec_cli.run.job.machine import usable_cores
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.wings.doctor.found_fabric import FabricFact, FoundFabric, FoundGpu, Nic, NumaNode
from trainspec_cli.wings.doctor.switches import read_levels
from trainspec_cli.wings.doctor.sysfs import (
    SYS,
    add_pci_facts,
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
"""Time limit for nvidia-smi, in seconds. It initialises every GPU of the node, which is slow without a persistent
driver process."""
SCONTROL = "scontrol show topology"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU\d+")
_LEGEND = re.compile(r"\s*(NIC\d+): (\S+)\s*")
_AFFINITIES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_CORES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
SELF = "X"
_LINK = re.compile(r"X|NV\d+|PIX|PXB|PHB|NODE|SYS|SOC")
RENAMED = {"SOC": "SYS"}
"""Link names used by drivers before 384 -> current names."""
COMMAND = "nvidia-smi topo -m"
WIDTH = 118
SCHEMA = "# yaml-language-server: $schema=../schema/fabric.json"
WIRING = "rails if NIC i of every node is on the same switch; one_switch if all NICs of a node are on one switch"


@dataclass(frozen=True)
class SourceText:
    """The text of a command's output or of a file, and where it comes from."""

    text: str
    source: str
    problem: str = ""
    """Why a command printed no output."""


@dataclass(frozen=True)
class NodeLinks:
    """The hardware found in a node."""

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
    topology: SourceText,
    measured: tuple[Sequence[PairRate], str] | None = None,
    devices_per_node: int | None = None,
    scaleup_devices: int | None = None,
) -> FoundFabric:
    """Combine a node, Slurm's topology and measured links into a fabric.

    A Slurm level of at most `scaleup_devices` devices does not become a tier, because fast links already connect these
    devices."""
    devices = devices_per_node or len(node.gpus) or min(2, usable_cores())
    inside, remarks = node_tiers(node.gpus, node.gpus_source, devices)
    network = network_of(node.gpus, node.nics, node.interfaces, devices, node.nics_source)
    levels = read_levels(topology.text)
    if scaleup_devices:
        levels = [level for level in levels if level.most_nodes * devices > scaleup_devices]
    between = network_tiers(network, levels, topology.source, devices)
    facts = [FabricFact("gpus", describe_links(node.gpus), node.gpus_source)]
    if chosen := rails(node.gpus, {nic for gpu in node.gpus for nic in gpu.nics}):
        found = ", ".join(f"{gpu} {'+'.join(names)}" for gpu, names in chosen.items())
        facts.append(FabricFact("rails", found, node.gpus_source))
    facts.append(FabricFact("nics", network.found, network.source))
    if node.numa_nodes:
        each = []
        for numa in node.numa_nodes:
            near = [gpu.name for gpu in node.gpus if gpu.numa_node == numa.number]
            memory = f", {format_bytes(numa.memory_bytes)}" if numa.memory_bytes else ""
            each.append(f"{numa.number}: cores {numa.cores}{memory}{', ' + ' '.join(near) if near else ''}")
        facts.append(FabricFact("numa", "; ".join(each), "/sys/devices/system/node"))
    switches = "Slurm lists none between nodes"
    if topology.problem:
        switches = f"unknown: {topology.problem}"
    elif levels:
        sizes = (f"{len(level.elements)} {level.name} of up to {level.most_nodes:,} nodes" for level in levels)
        switches = ", ".join(sizes)
    facts.append(FabricFact("switches", switches, topology.source))
    if measured:
        pairs, source = measured
        unknown = []
        if len(levels) >= 2:  # with fewer levels, Slurm's nodes are unknown
            known = {node for element in levels[-1].elements for node in element}
            unknown = [host for host in hosts_of(pairs) if host not in known]
        if unknown:
            remarks.append(f"the rates in {source} are ignored: Slurm does not know the nodes {', '.join(unknown)}")
        else:
            between = with_measured(between, pairs, levels, source, devices, network.rdma_nics)
            remarks.append(f"measured rates are those of collectives: plan with '{EFFICIENCY}'")
        facts.append(FabricFact("measured", f"{len(pairs)} links between {len(hosts_of(pairs))} nodes", source))
    if devices_per_node and node.gpus and devices_per_node != len(node.gpus):
        remarks.append(f"cluster.devices_per_node is {devices_per_node}, but {len(node.gpus)} GPUs were found")
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


# Describe this machine


def links_here(root: Path = SYS) -> NodeLinks:
    """Return the links of this node, from the kernel and, if present, nvidia-smi."""
    nics = read_nics(root / "class/infiniband")
    interfaces = read_interfaces(root / "class/net")
    pci = read_gpus(nics, root)
    gpus = pci
    source = "/sys/bus/pci/devices"
    remarks = []
    try:
        matrix = run_nvidia_smi()
        if matrix:
            gpus = add_pci_facts(parse_matrix(matrix.text, matrix.source), pci)
            source = matrix.source
        elif pci:
            remarks.append("this node has no nvidia-smi, so NVLink is not detected")
    except MachineError as error:
        remarks.append(f"{error.problems[0].message}, so NVLink is not detected")
    return NodeLinks(
        node_name(),
        tuple(gpus),
        source,
        tuple(nics),
        tuple(interfaces),
        tuple(read_numa_nodes(root)),
        remarks=tuple(remarks),
    )


def run_nvidia_smi() -> SourceText | None:
    """Return the output of nvidia-smi; None if it is not installed. Raises MachineError if it fails."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(
            COMMAND.split(), capture_output=True, text=True, errors="replace", timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"{COMMAND} did not answer within {TIMEOUT_S:g} s"
        raise MachineError(Problem("nvidia_smi", message, hint="dmesg | grep NVRM", environment=True)) from error
    if done.returncode:
        reason = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise MachineError(Problem("nvidia_smi", f"{COMMAND} failed: {reason}", hint="nvidia-smi", environment=True))
    return SourceText(done.stdout, COMMAND)


def topology_here() -> SourceText:
    """Return Slurm's list of switches, or why it is unavailable."""
    try:
        return SourceText(slurm.show_topology(), SCONTROL)
    except MachineError as error:
        return SourceText("", SCONTROL, error.problems[0].message.splitlines()[0])


# Findings about the fabric


def describe_links(gpus: Sequence[FoundGpu]) -> str:
    """Describe the links between GPUs, most frequent first, such as `8: NV18 between 28 pairs`."""
    if not gpus:
        return "none"
    pairs = [
        link
        for index, gpu in enumerate(gpus)
        for link in (gpu.links.get(other.name, "?") for other in gpus[index + 1 :])
    ]
    count = {link: pairs.count(link) for link in dict.fromkeys(pairs)}
    links = ", ".join(f"{link} between {number}" for link, number in sorted(count.items(), key=lambda one: -one[1]))
    return f"{len(gpus)}: {links} pair{'s' * (len(pairs) > 1)}" if pairs else str(len(gpus))


# The matrix of nvidia-smi


def parse_matrix(text: str, source: str) -> list[FoundGpu]:
    """Return the GPUs of a node with their links. Raises MachineError with `source` and the line.

    Other lines are skipped, because the matrix may be part of a longer report."""
    lines = _COLOUR.sub("", text).splitlines()
    header = None
    for number, line in enumerate(lines):
        words = line.split()
        # The header starts with GPU0, but so does the first row, whose second word is a link.
        if words[:1] == ["GPU0"] and not (len(words) > 1 and _LINK.fullmatch(words[1])):
            header = number
            break
    if header is None:
        hint = f"pass the complete output of `{COMMAND}`: {COMMAND} > topology.txt"
        raise MachineError(Problem("no_matrix", f"{source} contains no GPU matrix", hint=hint, environment=True))
    affinities = [name for name in _AFFINITIES if name in lines[header]]
    columns = lines[header].partition(_AFFINITIES[0])[0].split()
    names = {match[1]: match[2] for line in lines[header:] if (match := _LEGEND.fullmatch(line))}
    rows: dict[str, list[str]] = {}
    for number, line in enumerate(lines[header + 1 :], header + 2):
        words = line.split()
        if words and words[0] in columns and words[0] not in rows:
            links = words[1 : len(columns) + 1]
            wrong = next((cell for cell in links if not _LINK.fullmatch(cell)), None)
            if wrong is not None or len(links) != len(columns):
                bad = f"`{wrong}`, which is not a link" if wrong is not None else f"{len(links)} links"
                message = f"{source}:{number}: the row of {words[0]} has {bad}; expected {len(columns)}, such as NV18, "
                message += "PIX, PXB, NODE or SYS"
                hint = f"pass the unchanged output of `{COMMAND}`"
                raise MachineError(Problem("bad_matrix", message, hint=hint, environment=True))
            rows[words[0]] = words[1:]
        elif words and rows:
            break
    gpus = [column for column in columns if _GPU.fullmatch(column)]
    if missing := [gpu for gpu in gpus if gpu not in rows]:
        message = f"the matrix in {source} has columns but no rows for {', '.join(missing)}"
        raise MachineError(
            Problem("no_matrix", message, hint=f"pass the complete output of `{COMMAND}`", environment=True)
        )
    found = []
    for gpu in gpus:
        row = rows[gpu]
        joined = {other: RENAMED.get(link, link) for other, link in zip(columns, row, strict=False) if other != gpu}
        # The core list may be blank but the other affinities are not, so match from the end of the row.
        after_links = dict(zip(reversed(affinities), reversed(row[len(columns) :]), strict=False))
        cores = after_links.get("CPU Affinity", "")
        numa = after_links.get("NUMA Affinity", "")
        found.append(
            FoundGpu(
                gpu,
                links={other: link for other, link in joined.items() if _GPU.fullmatch(other)},
                nics={names.get(other, other): link for other, link in joined.items() if not _GPU.fullmatch(other)},
                cores=cores if _CORES.fullmatch(cores) else "",
                numa_node=int(numa) if numa.isdigit() else None,
            )
        )
    return found


# Write an option of the group `fabric`


def render_group(found: FoundFabric, name: str, *, has_schema: bool) -> str:
    """Return the YAML of conf/fabric/NAME.yaml. `has_schema`: whether a neighbouring folder contains the schemas."""
    lines = ["# @package cluster.fabric", *([SCHEMA] if has_schema else [])]
    lines += _comment(f"The fabric of {found.host}, found by `trainspec fabric`. Values marked ... were not found.")
    lines += [line for remark in found.remarks for line in _comment(f"Note: {remark}.")]
    lines += [f"name: {json.dumps(name, allow_nan=False)}", "tiers:"]
    for tier in found.tiers:
        spec = tier.spec
        lines.append(f"  - name: {json.dumps(spec.name, allow_nan=False)}")
        lines += [f"    devices: {spec.devices}"] if spec.devices is not None else []
        lines += [f"    gbit_per_s: {spec.gbit_per_s:g}"] if spec.gbit_per_s is not None else []
        lines += [f"    latency_us: {spec.latency_us:g}"] if spec.latency_us is not None else []
        lines += [f"    kind: {spec.kind}"] if spec.kind is not None else []
        for key, advice in tier.left_out.items():
            lines += _comment(f"{key}: ...  {advice}", "    # ")
    lines += [
        *_comment(f"nic_wiring: {WIRING}. It cannot be detected from one node."),
        "nic_wiring: null",
        "planes: null",
    ]
    lines += ["nccl_tuner: false", "sources:"]
    lines += [f"  {key}: {json.dumps(source, allow_nan=False)}" for key, source in found.spec(name).sources.items()]
    return "\n".join(lines) + "\n"


def _comment(text: str, margin: str = "# ") -> list[str]:
    words = printable(" ".join(text.split()))
    return textwrap.wrap(words, WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
