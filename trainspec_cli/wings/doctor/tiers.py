"""Derive the tiers of a fabric from a node's links, its NICs, Slurm's switches and measured links."""

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
"""GPU-to-NIC links that only cross PCIe switches, bypassing the CPU."""
LEFT_TO_ACCELERATOR = (
    "default: the accelerator's data sheet (cluster.accelerator.link_gb_per_s); write the actual rate if it differs"
)
RATE_TO_FILL = "default: cluster.nic_gbit_per_s; write the rate per device in Gbit/s, in one direction"
LATENCY_TO_FILL = "default: the planner's latency per hop; write the latency measured by trainspec doctor (--measured)"
UPLINKS_TO_FILL = "default: 1; write 3 if the devices below can send three times the uplinks' rate"


# Tiers inside a node


def node_tiers(gpus: Sequence[FoundGpu], source: str, devices_per_node: int) -> tuple[list[FoundTier], list[str]]:
    """Return the tiers inside a node for a run with this many devices per node, and remarks about links that the tiers
    do not describe."""
    if len(gpus) < 2:
        name = "node" if not gpus else "gpu"
        return [FoundTier(TierSpec(name), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], []
    joined = groups_by(gpus, lambda link: link.startswith(NVLINK))
    if len(joined) == 1 or (_are_equal_and_in_order(joined, gpus) and 1 < devices_per_node <= len(joined[0])):
        # Add a remark if the domain is not a full mesh, as in a DGX-1.
        pairs = [link for gpu in gpus for link in gpu.links.values()]
        direct = sum(link.startswith(NVLINK) for link in pairs)
        remarks = []
        if direct < len(pairs):
            among = f"{direct // 2} of the {len(pairs) // 2} pairs of GPUs directly"
            remarks = [f"NVLink connects {among}, and the other pairs through other GPUs"]
        return [FoundTier(TierSpec("nvlink"), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], remarks
    if len(joined) == len(gpus):
        # The link between the CPUs does not become a tier. Its speed is unknown, and the planner would treat a tier of
        # unknown speed as the network.
        remarks = []
        sockets = groups_by(gpus, lambda link: link not in ("SYS", "?"))
        if len(sockets) > 1 and _are_equal_and_in_order(sockets, gpus) and len(sockets[0]) > 1:
            tiers = f"{{name: pcie, devices: {len(sockets[0])}}}, {{name: node, devices: {len(gpus)}, gbit_per_s: ...}}"
            among = " and ".join(f"{group[0]} to {group[-1]}" for group in sockets)
            remarks.append(
                f"PCIe connects the GPUs within {among}, and the link between the CPUs (SYS) connects the others; to "
                f"plan with that link's rate per GPU, replace the first tier by {tiers}"
            )
        return [_pcie(gpus, source)], remarks
    if not _are_equal_and_in_order(joined, gpus):
        order = ",".join(name.removeprefix("GPU") for group in sorted(joined, key=len, reverse=True) for name in group)
        among = ", ".join("+".join(group) for group in joined if len(group) > 1)
        remark = (
            f"NVLink connects {among}, which are not groups of equal size and consecutive numbers, so the tier is "
            f"PCIe; CUDA_VISIBLE_DEVICES={order} makes connected GPUs consecutive"
        )
        return [_pcie(gpus, source)], [remark]
    nvlink = FoundTier(TierSpec("nvlink", len(joined[0])), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})
    pcie = _pcie(gpus, source)
    left_out = dict.fromkeys(pcie.left_out, RATE_TO_FILL)
    return [nvlink, replace(pcie, spec=replace(pcie.spec, devices=devices_per_node), left_out=left_out)], []


def _pcie(gpus: Sequence[FoundGpu], source: str) -> FoundTier:
    rates = [gpu.pcie_gbit_per_s for gpu in gpus]
    if any(rate is None for rate in rates):
        return FoundTier(TierSpec("pcie"), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})
    slowest = min(rate for rate in rates if rate is not None)
    return FoundTier(TierSpec("pcie", gbit_per_s=slowest), f"{source}, max_link_speed of each GPU")


def groups_by(gpus: Sequence[FoundGpu], joins: Callable[[str], bool]) -> list[list[str]]:
    """Group the GPUs that are connected by a chain of links that satisfy `joins`. GPUs and groups keep their order."""
    groups: list[list[str]] = []
    order = {gpu.name: number for number, gpu in enumerate(gpus)}
    for gpu in gpus:
        reached = {gpu.name, *(other for other, link in gpu.links.items() if joins(link))}
        touched = [group for group in groups if reached & set(group)]
        groups = [group for group in groups if group not in touched]
        merged = {name for group in touched for name in group} | reached
        groups.append(sorted(merged & order.keys(), key=order.__getitem__))
    return sorted(groups, key=lambda group: order[group[0]])


def _are_equal_and_in_order(groups: Sequence[Sequence[str]], gpus: Sequence[FoundGpu]) -> bool:
    """Return whether the groups have the same size and consist of consecutive GPUs, as rank placement requires."""
    in_order = [name for group in groups for name in group] == [gpu.name for gpu in gpus]
    return in_order and len({len(group) for group in groups}) == 1


# Network rate per device


@dataclass(frozen=True)
class Network:
    """The network rate of each device in a node."""

    tier: TierSpec
    found: str
    source: str
    chosen: tuple[Nic, ...] = ()
    """The NICs that carry the devices' traffic."""

    @property
    def rdma_nics(self) -> int:
        return len(self.chosen) if self.tier.kind != "ethernet" else 0


def rails(gpus: Sequence[FoundGpu], nics: Collection[str]) -> dict[str, list[str]]:
    """Return the NICs in `nics` that are below the same PCIe switches as each GPU; empty if a GPU has no such NIC."""
    near = {gpu.name: [nic for nic, link in gpu.nics.items() if link in NEAR_NIC and nic in nics] for gpu in gpus}
    closest = {gpu.name: [nic for nic in near[gpu.name] if gpu.nics[nic] == NEAR_NIC[0]] for gpu in gpus}
    chosen = {name: closest[name] or near[name] for name in near}
    return chosen if chosen and all(chosen.values()) else {}


def network_of(
    gpus: Sequence[FoundGpu], nics: Sequence[Nic], interfaces: Sequence[Nic], devices_per_node: int, unknown: str
) -> Network:
    """Return the network rate per device: from the NICs near GPUs, from all RDMA NICs, or from the fastest interface.

    `unknown` is the source if none of them exist."""
    near = {nic for names in rails(gpus, [nic.name for nic in nics]).values() for nic in names}
    chosen = [nic for nic in nics if nic.name in near]
    if not chosen:
        # Use the kind of NIC with the highest total rate. Other NICs are probably for storage.
        kinds = sorted({nic.kind for nic in nics})
        total = {kind: sum(nic.gbit_per_s or 0.0 for nic in nics if nic.kind == kind) for kind in kinds}
        chosen = [nic for nic in nics if nic.kind == max(kinds, key=lambda kind: total[kind])]
    if chosen:
        # The slowest NIC limits traffic that is striped over all of them.
        slowest = min(nic.gbit_per_s or 0.0 for nic in chosen)
        share = round(slowest * len(chosen) / devices_per_node, 3)
        left = [nic.name for nic in nics if nic not in chosen]
        others = f"; not used: {', '.join(left)}" if left else ""
        found = f"{', '.join(nic.name for nic in chosen)} at {slowest:g} Gbit/s for {devices_per_node} devices{others}"
        tier = TierSpec("network", gbit_per_s=share, kind=chosen[0].kind)
        return Network(tier, found, str(INFINIBAND), tuple(chosen))
    fastest = max(interfaces, key=lambda one: one.gbit_per_s or 0.0, default=None)
    if fastest is None or fastest.gbit_per_s is None:
        return Network(TierSpec("network"), "no NIC with a known rate", unknown)
    share = round(fastest.gbit_per_s / devices_per_node, 3)
    found = f"{fastest.name}, {fastest.gbit_per_s:g} Gbit/s with TCP for {devices_per_node} devices"
    return Network(TierSpec("network", gbit_per_s=share, kind="ethernet"), found, str(INTERFACES), (fastest,))


# Tiers between nodes


def network_tiers(
    network: Network, levels: Sequence[SwitchLevel], switches_source: str, devices_per_node: int
) -> list[FoundTier]:
    """Return the tiers between nodes, one per Slurm level; the last one contains all nodes."""
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
        FoundTier(spec, source, left_out | (uplinks if index else {}))
        for index, spec in enumerate([*specs, network.tier])
    ]


def with_measured(
    tiers: Sequence[FoundTier],
    pairs: Sequence[PairRate],
    levels: Sequence[SwitchLevel],
    source: str,
    devices_per_node: int,
    nics_per_node: int,
) -> list[FoundTier]:
    """Return the tiers between nodes with measured rates and latencies.

    With Slurm's switches, a pair of nodes belongs to the lowest level that connects it. A tier without measured pairs
    does not change."""
    if len(levels) < 2:
        near = near_groups(pairs)
        found = measured_tiers(pairs, near, devices_per_node, nics_per_node)
        return [FoundTier(tier, source) for tier in found]
    crossed: dict[int, list[PairRate]] = {}
    for pair in pairs:
        connecting = (
            index for index, level in enumerate(levels) if any(set(pair.hosts) <= set(e) for e in level.elements)
        )
        crossed.setdefault(next(connecting, len(levels) - 1), []).append(pair)
    return [
        FoundTier(measured_tier(tier.spec, crossed[index], devices_per_node, nics_per_node), f"{tier.source}; {source}")
        if index in crossed
        else tier
        for index, tier in enumerate(tiers)
    ]


# Measured links between nodes

MIN_RATIO = 2.0
"""Minimum ratio between the rates or latencies of near and far links. Smaller ratios are ignored."""

EFFICIENCY = "cluster.efficiency={nic: 1}"
"""The key to set when planning with measured rates, because these are already rates of collectives."""


def check_fabric(pairs: Sequence[PairRate], devices_per_node: int, nics_per_node: int) -> Iterator[Check]:
    """Return the measured links as tiers; nothing if there are no links."""
    if not pairs:
        return
    groups = near_groups(pairs)
    written = []
    for tier in measured_tiers(pairs, groups, devices_per_node, nics_per_node):
        size = f"devices: {tier.devices}," if tier.devices else ""
        rates = f"gbit_per_s: {tier.gbit_per_s:g},latency_us: {tier.latency_us:g}"
        written.append(f"{{name: {tier.name},{size}{rates},kind: {tier.kind}}}")
    tiers = ",".join(written)
    found = "measured links between nodes"
    if groups is not None:
        found += f", faster within {' and within '.join(', '.join(sorted(group)) for group in groups)}"
    yield Check("fabric", "ok", f"{found}: 'cluster.fabric.tiers=[{{name: domain}},{tiers}]' '{EFFICIENCY}'")


def measured_tiers(
    pairs: Sequence[PairRate], groups: Sequence[set[str]] | None, devices_per_node: int, nics_per_node: int
) -> list[TierSpec]:
    """Return the tier within a group of nodes, if there are `groups`, and the tier between all nodes."""
    ends = groups or [{host} for host in hosts_of(pairs)]
    inside = [pair for pair in pairs if any(set(pair.hosts) <= group for group in ends)]
    across = [pair for pair in pairs if pair not in inside]
    network = measured_tier(TierSpec("network"), across, devices_per_node, nics_per_node)
    if not inside:
        return [network]
    near = TierSpec("near", devices=len(ends[0]) * devices_per_node)
    return [measured_tier(near, inside, devices_per_node, nics_per_node), network]


def measured_tier(tier: TierSpec, pairs: Sequence[PairRate], devices_per_node: int, nics_per_node: int) -> TierSpec:
    """Return the tier with the median rate and latency of `pairs`, which must not be empty.

    In a measurement, two processes use all NICs of their nodes. In a run, the devices share them: each device gets the
    rate of one NIC, or a fraction of it (`nics_per_node`; 0 means TCP over one interface). Measured rates are those of
    collectives on any kind of network, so the planner uses them without an efficiency factor (`EFFICIENCY`)."""
    share = min(1.0, max(1, nics_per_node) / devices_per_node)
    gbit_per_s = median(pair.bytes_per_s for pair in pairs) * 8 / 1e9 * share
    latency_us = median(_latency_s(pair) for pair in pairs) * 1e6
    # Three significant digits, because measurements are not more precise.
    return replace(tier, gbit_per_s=float(f"{gbit_per_s:.3g}"), latency_us=float(f"{latency_us:.3g}"), kind="measured")


def _latency_s(pair: PairRate) -> float:
    return pair.sizes[0].seconds


def hosts_of(pairs: Sequence[PairRate]) -> list[str]:
    return list(dict.fromkeys(host for pair in pairs for host in pair.hosts))


def near_groups(pairs: Sequence[PairRate]) -> list[set[str]] | None:
    """Return equal-sized groups of consecutive nodes whose internal links are faster or have lower latency than all
    others. None if there are no such groups, or if not all pairs were measured."""
    hosts = hosts_of(pairs)
    if len(pairs) < math.comb(len(hosts), 2):
        return None
    quantities: tuple[Callable[[PairRate], float], ...] = (lambda pair: 1 / pair.bytes_per_s, _latency_s)
    for quantity in quantities:
        least, most = (bound(map(quantity, pairs)) for bound in (min, max))
        if most < MIN_RATIO * least:
            continue
        # Nodes connected by a chain of near pairs form one group.
        groups = [{host} for host in hosts]
        for pair in (pair for pair in pairs if quantity(pair) < math.sqrt(least * most)):
            first, second = (next(group for group in groups if host in group) for host in pair.hosts)
            if first is not second:
                first |= second
                groups.remove(second)
        near = [quantity(pair) for pair in pairs if any(set(pair.hosts) <= group for group in groups)]
        far = [quantity(pair) for pair in pairs if not any(set(pair.hosts) <= group for group in groups)]
        equal = len({len(group) for group in groups}) == 1
        consecutive = [host for group in groups for host in hosts if host in group] == hosts
        if near and far and equal and consecutive and max(near) * math.sqrt(MIN_RATIO) < min(far):
            return groups
    return None
