"""Read Slurm's switches and node blocks from `scontrol show topology` or topology.conf."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from trainspec_cli.recipe.results.doctor import Check

_FIELD = re.compile(r"(\w+)=(\S+)")
_NAMES = re.compile(r"(?:[^,\[\]]|\[[^\]]*\])+")
_RANGES = re.compile(r"([^\[]*)\[([^\]]*)\](.*)")
MAX_NAMES = 1_000_000
"""Maximum number of names in an expanded host list. No cluster has that many nodes."""
NONE = "(null)"
"""What `scontrol` prints for an empty list."""


@dataclass(frozen=True)
class SwitchLevel:
    """The elements of one network level: leaf switches, higher switches, or blocks of nodes."""

    name: str
    elements: tuple[tuple[str, ...], ...]
    """The nodes below each element."""

    @property
    def most_nodes(self) -> int:
        return max(len(element) for element in self.elements)


def read_levels(topology: str) -> list[SwitchLevel]:
    """Return the levels of Slurm's topology/tree and topology/block plugins, leaves first.

    Levels that connect only one node, or no more nodes than the level below, are omitted."""
    # Remove comments, and join lines that end with a backslash with the next line.
    without = "\n".join(line.partition("#")[0].rstrip() for line in topology.splitlines())
    whole = without.replace("\\\n", " ").splitlines()
    lines = [{key.lower(): value for key, value in _FIELD.findall(line)} for line in whole]
    levels = _blocks(lines)
    if not levels:
        # `scontrol` prints the level of each switch and all nodes below it. topology.conf lists only direct children.
        switches = {line["switchname"]: line for line in lines if "switchname" in line}
        at: dict[int, list[tuple[str, ...]]] = {}
        for name in switches:
            height, nodes = _below(name, switches, ())
            if nodes:
                at.setdefault(height, []).append(nodes)
        levels = [SwitchLevel(f"level{height}", tuple(at[height])) for height in sorted(at)]
    connecting: list[SwitchLevel] = []
    for level in levels:
        if level.most_nodes > (connecting[-1].most_nodes if connecting else 1):
            connecting.append(level)
    return connecting


def _below(name: str, switches: Mapping[str, Mapping[str, str]], above: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return the level of a switch and the nodes below it. Switches in a cycle count as having no nodes."""
    line = switches.get(name, {})
    nodes = expand_hosts(line.get("nodes", ""))
    if nodes or name in above:
        return (int(line["level"]) if line.get("level", "").isdigit() else 0), tuple(nodes)
    lower = [_below(other, switches, (*above, name)) for other in expand_hosts(line.get("switches", ""))]
    height = 1 + max((height for height, _ in lower), default=0)
    return height, tuple(dict.fromkeys(node for _, nodes in lower for node in nodes))


def _blocks(lines: Sequence[Mapping[str, str]]) -> list[SwitchLevel]:
    """Return the blocks and the groups of blocks (AggregatedBlock, or BlockSizes in topology.conf)."""
    blocks = [tuple(expand_hosts(line["nodes"])) for line in lines if "blockname" in line and "nodes" in line]
    if not blocks:
        return []
    sizes: dict[int, list[tuple[str, ...]]] = {}
    for line in lines:
        if "aggregatedblock" in line:
            nodes = tuple(expand_hosts(line.get("nodes", "")))
            sizes.setdefault(len(nodes), []).append(nodes)
    planned = next((line["blocksizes"] for line in lines if "blocksizes" in line), "")
    base, *larger = [int(size) for size in planned.split(",") if size.isdigit()] or [0]
    for size in larger if base else ():
        per_group = max(1, size // base)
        groups = [blocks[start : start + per_group] for start in range(0, len(blocks), per_group)]
        sizes.setdefault(size, []).extend(tuple(node for block in group for node in block) for group in groups)
    aggregated = [SwitchLevel(f"blocks{size}", tuple(sizes[size])) for size in sorted(sizes) if sizes[size]]
    return [SwitchLevel("block", tuple(blocks)), *aggregated]


def expand_hosts(hosts: str) -> list[str]:
    """Return the names of a Slurm host list: `gpu[001-003,7],login` -> gpu001, gpu002, gpu003, gpu7, login."""
    if hosts == NONE:
        return []
    return list(islice((name for part in _NAMES.findall(hosts) for name in _expand(part)), MAX_NAMES))


def _expand(name: str) -> Iterator[str]:
    match = _RANGES.fullmatch(name)
    if match is None:
        yield name
        return
    before, ranges, rest = match.groups()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            continue
        for number in range(int(first), int(last or first) + 1):
            yield from (f"{before}{number:0{len(first)}d}{tail}" for tail in _expand(rest))


def check_switches(topology: str, devices_per_node: int) -> Iterator[Check]:
    """Return Slurm's switches as tiers; nothing if there are fewer than two levels."""
    levels = read_levels(topology)
    if len(levels) < 2:
        return
    nodes = ", ".join(f"{level.most_nodes:,}" for level in levels)
    middle = ",".join(f"{{name: {level.name},devices: {level.most_nodes * devices_per_node}}}" for level in levels[:-1])
    tiers = f"cluster.fabric.tiers=[{{name: domain}},{middle},{{name: top}}]"
    yield Check("switches", "ok", f"Slurm's switches have up to {nodes} nodes below them, by level: {tiers}")
