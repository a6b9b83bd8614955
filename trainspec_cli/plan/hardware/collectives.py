"""Time of a collective: latency, then bytes over the narrower of fast links and network (alpha-beta model).

Hockney's model with the ring's volumes, as in Thakur et al. 2005; inside a node all ranks' network cards carry
one ring each. Error against measured NCCL curves: about 20% from 1 MB up, more below.
"""

from __future__ import annotations

from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Group


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
    steps, sent_s = group.size - 1, total_bytes / group.size / group.ring_bytes_per_s
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
    domains, own = group.domains, max(1, ranks // group.per_domain)
    if copies > 1 and domains > 1:
        crossings = min(crossings, (domains - own) * (1 - (1 - 1 / domains) ** copies))
    return sent_bytes / copies * crossings


def send_s(group: Group, message_bytes: float, eff: Efficiency) -> float:
    """Seconds of sending `message_bytes` to a neighbour on the axis; over the narrowest tier beyond the first network
    tier, where some neighbours are on both sides of it and all others wait for them."""
    if group.size <= 1:
        return 0.0
    near, near_s = group.link_bytes_per_s, group.link_latency_s
    if group.crosses and group.per_domain == 1:
        near, near_s = group.nic_bytes_per_s, group.nic_latency_s
    bandwidth = min([near, *(tier.bytes_per_s for tier in group.outer)])
    slowest_s = max(near_s or 0.0, *(tier.latency_s or 0.0 for tier in group.outer), 0.0)
    return eff.collective_latency_s + slowest_s + message_bytes / bandwidth
