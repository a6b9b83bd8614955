"""Make the tiers of a fabric of what was found: the links of a node, its NICs, Slurm's switches, measured links."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from trainspec_cli.recipe.keys.cluster import TierSpec
from trainspec_cli.recipe.results.doctor import Check
from trainspec_cli.recipe.results.tools import PairRate
from trainspec_cli.wings.doctor.found_fabric import FoundGpu, FoundTier, Nic
from trainspec_cli.wings.doctor.switches import SwitchLevel
from trainspec_cli.wings.doctor.sysfs import INFINIBAND, INTERFACES

NVLINK = "NV"
NEAR_NIC = ("PIX", "PXB")
"""The ways between a GPU and a NIC that lead over PCIe switches alone, and not over the CPU."""
LEFT_TO_ACCELERATOR = "the accelerator's data sheet counts (cluster.accelerator.link_gb_per_s); write what differs"
RATE_TO_FILL = "write a device's share in Gbit/s, one direction; without it cluster.nic_gbit_per_s counts"
LATENCY_TO_FILL = (
    "the planner's figure for a hop counts; write what trainspec doctor measures between nodes (--measured)"
)
UPLINKS_TO_FILL = "1 counts; write 3 where the devices below send three times what the uplinks carry"


# Inside a node


def node_tiers(gpus: Sequence[FoundGpu], source: str, devices_per_node: int) -> tuple[list[FoundTier], list[str]]:
    """Return the tiers inside a node, of which a run takes this many devices, and remarks on what they leave out."""
    if len(gpus) < 2:
        name = "node" if not gpus else "gpu"
        return [FoundTier(TierSpec(name), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], []
    joined = groups_by(gpus, lambda link: link.startswith(NVLINK))
    if len(joined) == 1 or (_are_alike(joined, gpus) and 1 < devices_per_node <= len(joined[0])):
        # Where a domain is no full mesh, as in a DGX-1, that is said.
        pairs = [link for gpu in gpus for link in gpu.links.values()]
        direct = sum(link.startswith(NVLINK) for link in pairs)
        remarks = []
        if direct < len(pairs):
            among = f"{direct // 2} of the {len(pairs) // 2} pairs of GPUs directly"
            remarks = [f"NVLink joins {among}, and the others over these"]
        return [FoundTier(TierSpec("nvlink"), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], remarks
    if len(joined) == len(gpus):
        return _of_pcie(gpus, source)
    if not _are_alike(joined, gpus):
        return [_pcie(gpus, source)], [_unlike(joined)]
    nvlink = FoundTier(TierSpec("nvlink", len(joined[0])), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})
    pcie = _pcie(gpus, source)
    left_out = dict.fromkeys(pcie.left_out, RATE_TO_FILL)
    return [nvlink, replace(pcie, spec=replace(pcie.spec, devices=devices_per_node), left_out=left_out)], []


def _of_pcie(gpus: Sequence[FoundGpu], source: str) -> tuple[list[FoundTier], list[str]]:
    """Return the one tier of a node without NVLink: what the link between its CPUs carries is not found, and a tier of
    unknown speed would count as the network."""
    remarks = []
    sockets = groups_by(gpus, lambda link: link not in ("SYS", "?"))
    if len(sockets) > 1 and _are_alike(sockets, gpus) and len(sockets[0]) > 1:
        tiers = f"{{name: pcie, devices: {len(sockets[0])}}}, {{name: node, devices: {len(gpus)}, gbit_per_s: ...}}"
        among = " and ".join(f"{group[0]} to {group[-1]}" for group in sockets)
        remarks.append(
            f"GPUs reach one another by PCIe among {among}, and through the link between the CPUs (SYS) elsewhere; to "
            f"plan with what that carries for each GPU, put these in the place of the first tier: {tiers}"
        )
    return [_pcie(gpus, source)], remarks


def _pcie(gpus: Sequence[FoundGpu], source: str) -> FoundTier:
    rates = [gpu.pcie_gbit_per_s for gpu in gpus]
    if any(rate is None for rate in rates):
        return FoundTier(TierSpec("pcie"), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})
    slowest = min(rate for rate in rates if rate is not None)
    return FoundTier(TierSpec("pcie", gbit_per_s=slowest), f"{source}, max_link_speed of each GPU")


def groups_by(gpus: Sequence[FoundGpu], joins: Callable[[str], bool]) -> list[list[str]]:
    """Return the groups of GPUs that a chain of links joins which `joins`, each in order, the groups by their first."""
    groups: list[list[str]] = []
    place = {gpu.name: number for number, gpu in enumerate(gpus)}
    for gpu in gpus:
        reached = {gpu.name, *(other for other, link in gpu.links.items() if joins(link))}
        touched = [group for group in groups if reached & set(group)]
        groups = [group for group in groups if group not in touched]
        merged = {name for group in touched for name in group} | reached
        groups.append(sorted(merged & place.keys(), key=place.__getitem__))
    return sorted(groups, key=lambda group: place[group[0]])


def _are_alike(groups: Sequence[Sequence[str]], gpus: Sequence[FoundGpu]) -> bool:
    """Return whether the groups have one size and follow one another, as ranks do."""
    in_order = [name for group in groups for name in group] == [gpu.name for gpu in gpus]
    return in_order and len({len(group) for group in groups}) == 1


def _unlike(groups: Sequence[Sequence[str]]) -> str:
    order = ",".join(name.removeprefix("GPU") for group in sorted(groups, key=len, reverse=True) for name in group)
    among = ", ".join("+".join(group) for group in groups if len(group) > 1)
    return (
        f"NVLink joins {among}, which are no groups of one size that follow one another: the tier is PCIe; "
        f"CUDA_VISIBLE_DEVICES={order} puts those side by side that are joined"
    )


# NICs


@dataclass(frozen=True)
class Network:
    """The rate that the NICs of a node make for each of its devices."""

    tier: TierSpec
    found: str
    source: str
    chosen: tuple[Nic, ...] = ()
    """The NICs that the devices' traffic is striped over."""

    @property
    def rdma_nics(self) -> int:
        return len(self.chosen) if self.tier.kind != "ethernet" else 0


def rails(gpus: Sequence[FoundGpu], nics: Collection[str]) -> dict[str, list[str]]:
    """Return the NICs of `nics` beside each GPU, below the same PCIe switches; empty where a GPU has none."""
    near = {gpu.name: [nic for nic, link in gpu.nics.items() if link in NEAR_NIC and nic in nics] for gpu in gpus}
    closest = {gpu.name: [nic for nic in near[gpu.name] if gpu.nics[nic] == NEAR_NIC[0]] for gpu in gpus}
    chosen = {name: closest[name] or near[name] for name in near}
    return chosen if chosen and all(chosen.values()) else {}


def network_of(
    gpus: Sequence[FoundGpu], nics: Sequence[Nic], interfaces: Sequence[Nic], devices_per_node: int, unknown: str
) -> Network:
    """Return a device's share of the NICs that stand beside GPUs, else of all for RDMA, else of the fastest interface.

    `unknown` is the source where there are none.
    """
    beside = {nic for names in rails(gpus, [nic.name for nic in nics]).values() for nic in names}
    chosen = [nic for nic in nics if nic.name in beside]
    if not chosen:
        # NICs of the kind that carries most: others are for storage.
        kinds = sorted({nic.kind for nic in nics})
        carried = {kind: sum(nic.gbit_per_s or 0.0 for nic in nics if nic.kind == kind) for kind in kinds}
        chosen = [nic for nic in nics if nic.kind == max(kinds, key=lambda kind: carried[kind])]
    if chosen:
        # Traffic that is striped over NICs goes at the rate of the least.
        least = min(nic.gbit_per_s or 0.0 for nic in chosen)
        share = round(least * len(chosen) / devices_per_node, 3)
        left = [nic.name for nic in nics if nic not in chosen]
        besides = f"; besides them {', '.join(left)}" if left else ""
        found = f"{', '.join(nic.name for nic in chosen)} at {least:g} Gbit/s for {devices_per_node} devices{besides}"
        tier = TierSpec("network", gbit_per_s=share, kind=chosen[0].kind)
        return Network(tier, found, str(INFINIBAND), tuple(chosen))
    fastest = max(interfaces, key=lambda one: one.gbit_per_s or 0.0, default=None)
    if fastest is None or fastest.gbit_per_s is None:
        return Network(TierSpec("network"), "no NIC whose rate is known", unknown)
    share = round(fastest.gbit_per_s / devices_per_node, 3)
    found = f"{fastest.name}, {fastest.gbit_per_s:g} Gbit/s by TCP for {devices_per_node} devices"
    return Network(TierSpec("network", gbit_per_s=share, kind="ethernet"), found, str(INTERFACES), (fastest,))


# Between nodes


def network_tiers(
    network: Network, levels: Sequence[SwitchLevel], switches_source: str, devices_per_node: int
) -> list[FoundTier]:
    """Return the tiers beyond a node: those of Slurm's levels, the last of which holds all nodes."""
    left_out = {} if network.tier.gbit_per_s else {"gbit_per_s": RATE_TO_FILL}
    left_out["latency_us"] = LATENCY_TO_FILL
    if len(levels) < 2:
        return [FoundTier(network.tier, network.source, left_out)]
    source = f"{switches_source}; rate: {network.source}" if network.tier.gbit_per_s else switches_source
    uplinks = {"oversubscription": UPLINKS_TO_FILL}
    specs = [
        replace(network.tier, name=level.name, devices=level.most_nodes * devices_per_node) for level in levels[:-1]
    ]
    return [
        FoundTier(spec, source, left_out | (uplinks if place else {}))
        for place, spec in enumerate([*specs, network.tier])
    ]


def with_measured(
    tiers: Sequence[FoundTier],
    pairs: Sequence[PairRate],
    levels: Sequence[SwitchLevel],
    source: str,
    devices_per_node: int,
    nics_per_node: int,
) -> list[FoundTier]:
    """Return the tiers beyond a node with the rates and latencies that were measured between nodes.

    Where Slurm knows switches, a pair belongs to the lowest that joins it; a tier that no pair crossed stays as it is.
    """
    if len(levels) < 2:
        near = nodes_near_one_another(pairs)
        found = measured_tiers(pairs, near, devices_per_node, nics_per_node)
        return [FoundTier(tier, source) for tier in found]
    crossed: dict[int, list[PairRate]] = {}
    for pair in pairs:
        joined = (place for place, level in enumerate(levels) if any(set(pair.hosts) <= set(e) for e in level.elements))
        crossed.setdefault(next(joined, len(levels) - 1), []).append(pair)
    return [
        FoundTier(measured_tier(tier.spec, crossed[place], devices_per_node, nics_per_node), f"{tier.source}; {source}")
        if place in crossed
        else tier
        for place, tier in enumerate(tiers)
    ]


# Measured links between nodes

APART = 2.0
"""Links of nodes that share a switch and of nodes that do not differ by this factor, or cannot be told apart."""

EFFICIENCY = "cluster.efficiency={nic: 1}"
"""The values that a plan with measured rates is given: they are what collectives reach."""


def check_fabric(pairs: Sequence[PairRate], devices_per_node: int, nics_per_node: int) -> Iterator[Check]:
    """Say which tiers the measured links would be; nothing without links."""
    if not pairs:
        return
    groups = nodes_near_one_another(pairs)
    written = []
    for tier in measured_tiers(pairs, groups, devices_per_node, nics_per_node):
        size = f"devices: {tier.devices}," if tier.devices else ""
        rates = f"gbit_per_s: {tier.gbit_per_s:g},latency_us: {tier.latency_us:g}"
        written.append(f"{{name: {tier.name},{size}{rates},kind: {tier.kind}}}")
    tiers = ",".join(written)
    found = "links between nodes as measured"
    if groups is not None:
        found += f", nearer among {' and among '.join(', '.join(sorted(group)) for group in groups)}"
    yield Check("fabric", "ok", f"{found}: 'cluster.fabric.tiers=[{{name: domain}},{tiers}]' '{EFFICIENCY}'")


def measured_tiers(
    pairs: Sequence[PairRate], groups: Sequence[set[str]] | None, devices_per_node: int, nics_per_node: int
) -> list[TierSpec]:
    """Return the tiers beyond a node: between nodes of one of `groups`, where there are any, and between all."""
    ends = groups or [{host} for host in hosts_of(pairs)]
    inside = [pair for pair in pairs if any(set(pair.hosts) <= group for group in ends)]
    across = [pair for pair in pairs if pair not in inside]
    network = measured_tier(TierSpec("network"), across, devices_per_node, nics_per_node)
    if not inside:
        return [network]
    near = TierSpec("near", devices=len(ends[0]) * devices_per_node)
    return [measured_tier(near, inside, devices_per_node, nics_per_node), network]


def measured_tier(tier: TierSpec, pairs: Sequence[PairRate], devices_per_node: int, nics_per_node: int) -> TierSpec:
    """Return a tier with the usual rate and latency of `pairs`, which are not empty.

    Two processes had their nodes' NICs for themselves in each measurement, and share them in a run: a device's share is
    that of its NIC where it has one (`nics_per_node`; 0: TCP over one interface). Measured rates are what collectives
    reach, whatever the kind of network, so that the planner takes them whole (`EFFICIENCY`).
    """
    share = min(1.0, max(1, nics_per_node) / devices_per_node)
    gbit_per_s = median(pair.bytes_per_s for pair in pairs) * 8 / 1e9 * share
    latency_us = median(_latency_s(pair) for pair in pairs) * 1e6
    # Three digits: links are measured no better.
    return replace(tier, gbit_per_s=float(f"{gbit_per_s:.3g}"), latency_us=float(f"{latency_us:.3g}"), kind="measured")


def _latency_s(pair: PairRate) -> float:
    return pair.sizes[0].seconds


def hosts_of(pairs: Sequence[PairRate]) -> list[str]:
    return list(dict.fromkeys(host for pair in pairs for host in pair.hosts))


def nodes_near_one_another(pairs: Sequence[PairRate]) -> list[set[str]] | None:
    """Return groups of equally many nodes, in the order of the nodes, whose links among themselves are faster than
    all others, or else have less latency. None where no such groups are seen, or not every pair was measured."""
    hosts = hosts_of(pairs)
    if len(pairs) < math.comb(len(hosts), 2):
        return None
    quantities: tuple[Callable[[PairRate], float], ...] = (lambda pair: 1 / pair.bytes_per_s, _latency_s)
    for quantity in quantities:
        least, most = (bound(map(quantity, pairs)) for bound in (min, max))
        if most < APART * least:
            continue
        # A chain of near pairs joins the nodes of a group.
        groups = [{host} for host in hosts]
        for pair in (pair for pair in pairs if quantity(pair) < math.sqrt(least * most)):
            first, second = (next(group for group in groups if host in group) for host in pair.hosts)
            if first is not second:
                first |= second
                groups.remove(second)
        near = [quantity(pair) for pair in pairs if any(set(pair.hosts) <= group for group in groups)]
        far = [quantity(pair) for pair in pairs if not any(set(pair.hosts) <= group for group in groups)]
        alike = len({len(group) for group in groups}) == 1
        consecutive = [host for group in groups for host in hosts if host in group] == hosts
        if near and far and alike and consecutive and max(near) * math.sqrt(APART) < min(far):
            return groups
    return None
