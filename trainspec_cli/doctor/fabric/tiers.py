"""Make the tiers of a fabric of what was found: the links of a node, its NICs, Slurm's switches, measured links."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainspec_cli.doctor.measured_fabric import measured_tier, measured_tiers, nodes_near_one_another
from trainspec_cli.doctor.switches import SwitchLevel
from trainspec_cli.spec.recipe.fabric import TierSpec
from trainspec_cli.spec.results.fabric import FoundGpu, FoundTier, Nic
from trainspec_cli.spec.results.tools import PairRate

NVLINK = "NV"
NEAR_NIC = ("PIX", "PXB")
"""The ways between a GPU and a NIC that lead over PCIe switches alone, and not over the CPU."""
LEFT_TO_ACCELERATOR = "the accelerator's data sheet counts (cluster.accelerator.link_gb_per_s); write what differs"
INFINIBAND, INTERFACES = "/sys/class/infiniband", "/sys/class/net"
RATE_TO_FILL = "write a device's share in Gbit/s, one direction; without it cluster.nic_gbit_per_s counts"
LATENCY_TO_FILL = (
    "the planner's figure for a hop counts; write what trainspec doctor measures between nodes (--measured)"
)
UPLINKS_TO_FILL = "1 counts; write 3 where the devices below send three times what the uplinks carry"


# Inside a node


def node_tiers(gpus: Sequence[FoundGpu], source: str, devices_per_node: int) -> tuple[list[FoundTier], list[str]]:
    """Return the tiers inside a node, of which a run takes so many devices, and remarks on what they leave out."""
    if len(gpus) < 2:
        name = "node" if not gpus else "gpu"
        return [FoundTier(TierSpec(name), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], []
    joined = groups_by(gpus, lambda link: link.startswith(NVLINK))
    if len(joined) == 1 or (_are_alike(joined, gpus) and 1 < devices_per_node <= len(joined[0])):
        return [FoundTier(TierSpec("nvlink"), source, {"gbit_per_s": LEFT_TO_ACCELERATOR})], list(_partly(gpus))
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


def _partly(gpus: Sequence[FoundGpu]) -> Iterator[str]:
    """Say where a domain is no full mesh, as in a DGX-1."""
    pairs = [link for gpu in gpus for link in gpu.links.values()]
    direct = sum(link.startswith(NVLINK) for link in pairs)
    if direct < len(pairs):
        yield f"NVLink joins {direct // 2} of the {len(pairs) // 2} pairs of GPUs directly, and the others over these"


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
    chosen = [nic for nic in nics if nic.name in beside] or _of_one_kind(nics)
    if chosen:
        return _striped(chosen, nics, devices_per_node)
    fastest = max(interfaces, key=lambda one: one.gbit_per_s or 0.0, default=None)
    if fastest is None or fastest.gbit_per_s is None:
        return Network(TierSpec("network"), "no NIC whose rate is known", unknown)
    share = round(fastest.gbit_per_s / devices_per_node, 3)
    found = f"{fastest.name}, {fastest.gbit_per_s:g} Gbit/s by TCP for {devices_per_node} devices"
    return Network(TierSpec("network", gbit_per_s=share, kind="ethernet"), found, INTERFACES, (fastest,))


def _of_one_kind(nics: Sequence[Nic]) -> list[Nic]:
    """Return the NICs of the kind that carries most: others are for storage."""
    carried = {kind: sum(nic.gbit_per_s or 0.0 for nic in nics if nic.kind == kind) for kind in {n.kind for n in nics}}
    best = max(sorted(carried), key=lambda kind: carried[kind], default=None)
    return [nic for nic in nics if nic.kind == best]


def _striped(chosen: Sequence[Nic], nics: Sequence[Nic], devices_per_node: int) -> Network:
    """Return the network of NICs that traffic is striped over, which goes at the rate of the least."""
    least = min(nic.gbit_per_s or 0.0 for nic in chosen)
    share = round(least * len(chosen) / devices_per_node, 3)
    left = [nic.name for nic in nics if nic not in chosen]
    besides = f"; besides them {', '.join(left)}" if left else ""
    found = f"{', '.join(nic.name for nic in chosen)} at {least:g} Gbit/s for {devices_per_node} devices{besides}"
    return Network(TierSpec("network", gbit_per_s=share, kind=chosen[0].kind), found, INFINIBAND, tuple(chosen))


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
    crossed = _by_level(pairs, levels)
    return [
        FoundTier(measured_tier(tier.spec, crossed[place], devices_per_node, nics_per_node), f"{tier.source}; {source}")
        if place in crossed
        else tier
        for place, tier in enumerate(tiers)
    ]


def _by_level(pairs: Sequence[PairRate], levels: Sequence[SwitchLevel]) -> Mapping[int, list[PairRate]]:
    crossed: dict[int, list[PairRate]] = {}
    for pair in pairs:
        joined = (place for place, level in enumerate(levels) if any(set(pair.hosts) <= set(e) for e in level.elements))
        crossed.setdefault(next(joined, len(levels) - 1), []).append(pair)
    return crossed
