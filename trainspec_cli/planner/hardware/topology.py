"""The links that the ranks of a mesh axis speak over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from trainspec_cli.planner.hardware.rates import Efficiency, link_bytes_per_s
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec
from trainspec_cli.recipe.keys.layout import Layout

NIC_KIND_RATIO = {"infiniband": 1.0, "roce": 0.92, "efa": 0.8, "omnipath": 0.8, "ethernet": 0.6, "measured": 1.0}
"""Bandwidth that a collective reaches over each kind of network, relative to InfiniBand; a rate that was measured is
taken whole."""


def network_bytes_per_s(gbit_per_s: float, kind: str, eff: Efficiency) -> float:
    """Return what collectives achieve of a device's share of a network; never 0, to divide by."""
    return max(eff.nic * NIC_KIND_RATIO.get(kind, 0.8) * gbit_per_s / 8 * 1e9, 1.0)


@dataclass(frozen=True)
class NetworkTier:
    """A tier of the network beyond the scale-up domain."""

    name: str
    devices: int
    """Devices below one element of the tier."""
    gbit_per_s: float
    """A device's share of it, one direction, oversubscription taken off."""
    kind: str = "infiniband"
    latency_s: float | None = None
    """Latency of a message that crosses the tier; None: the planner's own hop."""

    def bytes_per_s(self, eff: Efficiency) -> float:
        return network_bytes_per_s(self.gbit_per_s, self.kind, eff)


@dataclass(frozen=True)
class Fabric:
    """Devices and the links between them."""

    chip: AcceleratorSpec
    num_devices: int
    devices_per_node: int
    scaleup_devices: int
    """Devices that share the fast links."""
    link_gb_per_s: float
    nic_gbit_per_s: float
    """A device's share, one direction."""
    nic_kind: str = "infiniband"
    host_link_gb_per_s: float = 50.0
    described: tuple[NetworkTier, ...] = ()
    """The network's tiers, innermost first; the last reaches every device. Empty: the NICs reach every device."""
    link_latency_s: float | None = None
    """Latency of a message inside a scale-up domain; None: the planner's own hop."""
    name: str = ""

    @cached_property
    def groups(self) -> dict[tuple[int, int], tuple[Efficiency, Group]]:
        """Groups of ranks by their size and stride, and the efficiencies that they were described for."""
        return {}

    @property
    def speaks_gloo(self) -> bool:
        """Return whether collectives are gloo's, as between CPUs."""
        return self.chip.vendor == "cpu"

    @property
    def network(self) -> tuple[NetworkTier, ...]:
        """Tiers beyond the scale-up domain, innermost first."""
        return self.described or (NetworkTier("network", self.num_devices, self.nic_gbit_per_s, self.nic_kind),)


@dataclass(frozen=True)
class Crossing:
    """A tier beyond the first network tier, as a group of ranks uses it that lies on both sides."""

    ranks: int
    """Ranks of the group inside one element of the tier below."""
    bytes_per_s: float
    """Bandwidth of one device."""
    latency_s: float | None = None


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective, as the network sees them."""

    size: int
    per_domain: int
    """Ranks of the group inside one scale-up domain."""
    link_bytes_per_s: float
    nic_bytes_per_s: float
    """Bandwidth of one device to other nodes."""
    outer: tuple[Crossing, ...] = ()
    """Tiers beyond the first network tier that the group crosses, innermost first."""
    link_latency_s: float | None = None
    nic_latency_s: float | None = None
    speaks_gloo: bool = False
    """gloo has no tree, each step of its rings waits for the slowest hop, and its reduce-scatter is an all-reduce of
    which a rank keeps its part."""

    @property
    def domains(self) -> int:
        return max(1, -(-self.size // self.per_domain))

    @property
    def crosses(self) -> bool:
        return self.size > self.per_domain

    @cached_property
    def ring_bytes_per_s(self) -> float:
        """Rate of rings through all ranks, ordered by tiers: each element's ranks carry a ring each to the next one."""
        if not self.crosses:
            return self.link_bytes_per_s
        network = self.nic_bytes_per_s * self.per_domain
        first = min(self.link_bytes_per_s, network) if self.per_domain > 1 else network
        return min([first, *(tier.ranks * tier.bytes_per_s for tier in self.outer)])

    @cached_property
    def spans(self) -> tuple[tuple[int, float | None], ...]:
        """Return for each network tier that the group crosses the elements of the tier below that one joins, and the
        latency of a message through it (None: the planner's own hop)."""
        insides = (self.per_domain, *(tier.ranks for tier in self.outer))
        latencies = (self.nic_latency_s, *(tier.latency_s for tier in self.outer))
        joined = (-(-outside // inside) for inside, outside in pairwise((*insides, self.size)))
        return tuple(zip(joined, latencies, strict=True))

    @cached_property
    def hops(self) -> tuple[float, float]:
        """Return the hops of one ring or tree pass over links whose latency is the planner's own, and the seconds of
        those over links that state theirs."""
        hops = 0.0
        stated_s = 0.0
        inside = ((min(self.per_domain, 8) - 1, self.link_latency_s),)
        across = ((2.0 * (joined - 1).bit_length(), latency) for joined, latency in self.spans)
        for passes, latency in (*inside, *across):
            if latency is None:
                hops += passes
            else:
                stated_s += passes * latency
        return hops, stated_s


def group_of(fabric: Fabric, size: int, stride: int, eff: Efficiency) -> Group:
    """`size` ranks, `stride` apart in the rank order. The fabric keeps the group: a search asks for a few hundred of
    them tens of thousands of times."""
    kept = fabric.groups.get((size, stride))
    if kept is None or kept[0] is not eff:
        group = group_with(fabric, size, lambda devices: min(size, max(1, devices // stride)), eff)
        kept = fabric.groups[size, stride] = eff, group
    return kept[1]


def group_with(fabric: Fabric, size: int, inside: Callable[[int], int], eff: Efficiency) -> Group:
    """`size` ranks; `inside` says how many of them an element of so many devices holds."""
    per_domain = inside(fabric.scaleup_devices)
    gloo = fabric.speaks_gloo
    link = link_bytes_per_s(fabric.chip, fabric.link_gb_per_s, per_domain, eff)
    if not fabric.described:
        network = network_bytes_per_s(fabric.nic_gbit_per_s, fabric.nic_kind, eff)
        return Group(size, per_domain, link, network, speaks_gloo=gloo)
    first, *others = fabric.described
    below = first
    outer = []
    for tier in others:
        ranks = inside(below.devices)
        if size > ranks:
            outer.append(Crossing(ranks, tier.bytes_per_s(eff), _hop_s(fabric, tier.latency_s)))
        below = tier
    hops_s = _hop_s(fabric, fabric.link_latency_s), _hop_s(fabric, first.latency_s)
    return Group(size, per_domain, link, first.bytes_per_s(eff), tuple(outer), *hops_s, gloo)


def _hop_s(fabric: Fabric, latency_s: float | None) -> float | None:
    """Return the latency of one step over a link: gloo sends once the receiver has said that it is ready."""
    return 2 * latency_s if latency_s is not None and fabric.speaks_gloo else latency_s


def axis_groups(layout: Layout, fabric: Fabric, eff: Efficiency) -> dict[str, Group]:
    """The groups of each axis, ranks laid out tp innermost, then cp, dp_shard, dp_replicate, and pp outermost."""
    tp = layout.tp
    cp = layout.cp
    inner = tp * cp
    dense = layout.data_parallel_size * cp
    expert_tp = layout.etp
    expert_dp = max(1, layout.data_parallel_size * cp * tp // (layout.ep * expert_tp))
    return {
        "tp": group_of(fabric, tp, 1, eff),
        "cp": group_of(fabric, cp, tp, eff),
        "etp": group_of(fabric, expert_tp, 1, eff),
        "ep": group_of(fabric, layout.ep, expert_tp, eff),
        "dp": group_of(fabric, dense, tp, eff),
        "dp_shard": group_of(fabric, layout.dp_shard * cp, tp, eff),
        "dp_replicate": group_of(fabric, layout.dp_replicate, inner * layout.dp_shard, eff),
        "expert_dp": group_of(fabric, expert_dp, layout.ep * expert_tp, eff),
        "pp": group_of(fabric, layout.pp, inner * layout.data_parallel_size, eff),
    }


# Time of a collective: latency, then bytes over the narrower of fast links and network (alpha-beta model).
#
# Hockney's model with the ring's volumes, as in Thakur et al. 2005; inside a node all ranks' network cards carry
# one ring each. Error against measured NCCL curves: about 20% from 1 MB up, more below.


def latency_s(group: Group, eff: Efficiency) -> float:
    """Latency of one ring or tree pass, in seconds: hops inside a domain, and a tree across each tier beyond."""
    if group.size <= 1:
        return 0.0
    hops, described_s = group.hops
    return eff.collective_latency_s + hops * eff.hop_latency_s + described_s


def all_gather_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Every rank ends with `total_bytes`."""
    if group.size <= 1 or total_bytes <= 0:
        return 0.0
    if group.speaks_gloo:
        return eff.collective_latency_s + gloo_ring_s(group, total_bytes, eff)
    return latency_s(group, eff) + total_bytes * (group.size - 1) / group.size / group.ring_bytes_per_s


def gloo_ring_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Seconds of the steps of gloo's ring, each of which waits for the slowest hop.

    A rank's part goes in two segments. A segment is sent once its receiver has said that it is ready, which it says
    while the other one is under way; of two ranks this word waits behind the data, in the same connection.
    """
    hop_s = _slowest_hop_s(group, eff)
    steps = group.size - 1
    sent_s = total_bytes / group.size / group.ring_bytes_per_s
    if group.size == 2:
        return steps * (sent_s + hop_s)
    return steps * max(sent_s, sent_s / 2 + hop_s) + hop_s


def _slowest_hop_s(group: Group, eff: Efficiency) -> float:
    hops_s = [group.link_latency_s] if group.per_domain > 1 else []
    hops_s += [latency_s for joined, latency_s in group.spans if joined > 1]
    return max((eff.hop_latency_s if latency_s is None else latency_s for latency_s in hops_s), default=0.0)


def reduce_scatter_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Every rank ends with its part of the sum of `total_bytes`. On gloo each sends every other one its part, and adds
    up what it gets (`engine/comm/exchange.py`).

    There the connections of a rank to its own domain are the quicker ones and have its link to themselves at first, so
    what crosses takes its time after them (measured: `tests/bench/fabrics.py --all`).
    """
    if not group.speaks_gloo or group.size <= 1 or total_bytes <= 0:
        return all_gather_s(group, total_bytes, eff)
    inside_s, *crossing_s = _tier_times_s(group, total_bytes, 1)
    return eff.collective_latency_s + _slowest_hop_s(group, eff) + inside_s + max(crossing_s)


def all_reduce_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """A reduce-scatter, and as much again to bring the parts together."""
    return 2.0 * reduce_scatter_s(group, total_bytes, eff)


def all_to_all_s(group: Group, sent_bytes: float, copies: int, eff: Efficiency) -> float:
    """Each rank spreads `sent_bytes`, `copies` of each token, evenly over the group.

    With copies above 1 a token crosses to a domain once, however many of its experts are there, and is copied
    inside (DeepEP, arXiv:2412.19437): of d domains it reaches (d-1) (1 - (1 - 1/d)^copies) others on average.
    """
    if group.size <= 1 or sent_bytes <= 0:
        return 0.0
    return latency_s(group, eff) + max(_tier_times_s(group, sent_bytes, copies, eff.all_to_all))


def _tier_times_s(group: Group, sent_bytes: float, copies: int, link_efficiency: float = 1.0) -> tuple[float, ...]:
    """Seconds of the bytes alone: inside the domain, over the network cards, and over each tier beyond."""
    inside = sent_bytes * (group.per_domain - 1) / group.size / (group.link_bytes_per_s * link_efficiency)
    outside = _crossing_bytes(group, sent_bytes, copies, group.per_domain) / group.nic_bytes_per_s
    beyond = (_crossing_bytes(group, sent_bytes, copies, tier.ranks) / tier.bytes_per_s for tier in group.outer)
    return (inside, outside, *beyond)


def _crossing_bytes(group: Group, sent_bytes: float, copies: int, ranks: int) -> float:
    """Bytes that a rank sends to beyond its own element of a tier, in which `ranks` of the group are."""
    crossings = (group.size - ranks) / group.size * copies
    domains = group.domains
    own = max(1, ranks // group.per_domain)
    if copies > 1 and domains > 1:
        crossings = min(crossings, (domains - own) * (1 - (1 - 1 / domains) ** copies))
    return sent_bytes / copies * crossings


def send_s(group: Group, message_bytes: float, eff: Efficiency) -> float:
    """Seconds of sending `message_bytes` to a neighbour on the axis; over the narrowest tier beyond the first network
    tier, where some neighbours are on both sides of it and all others wait for them."""
    if group.size <= 1:
        return 0.0
    near = group.link_bytes_per_s
    near_s = group.link_latency_s
    if group.crosses and group.per_domain == 1:
        near = group.nic_bytes_per_s
        near_s = group.nic_latency_s
    bandwidth = min([near, *(tier.bytes_per_s for tier in group.outer)])
    slowest_s = max(near_s or 0.0, *(tier.latency_s or 0.0 for tier in group.outer), 0.0)
    return eff.collective_latency_s + slowest_s + message_bytes / bandwidth
