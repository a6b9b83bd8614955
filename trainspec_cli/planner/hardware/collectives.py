"""Time of a collective: latency, then bytes over the narrower of fast links and network (alpha-beta model).

Hockney's model with the ring's volumes, as in Thakur et al. 2005; inside a node all ranks' network cards carry
one ring each. Error against measured NCCL curves: about 20% from 1 MB up, more below.
"""

from __future__ import annotations

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.hardware.topology import Group


def latency_s(group: Group, eff: Efficiency) -> float:
    """Latency of one ring or tree pass, in seconds: hops inside a domain, and a tree across domains."""
    if group.size <= 1:
        return 0.0
    hops = min(group.per_domain, 8) - 1 + 2.0 * (group.domains - 1).bit_length()
    return eff.collective_latency_s + hops * eff.hop_latency_s


def all_gather_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """Every rank ends with `total_bytes`. A reduce-scatter of as much takes the same."""
    if group.size <= 1 or total_bytes <= 0:
        return 0.0
    bandwidth = group.link_bytes_per_s
    if group.crosses:
        bandwidth = (
            min(bandwidth, group.nic_bytes_per_s * group.per_domain)
            if group.per_domain > 1
            else (group.nic_bytes_per_s)
        )
    return latency_s(group, eff) + total_bytes * (group.size - 1) / group.size / bandwidth


def all_reduce_s(group: Group, total_bytes: float, eff: Efficiency) -> float:
    """A reduce-scatter and an all-gather."""
    return 2.0 * all_gather_s(group, total_bytes, eff)


def all_to_all_s(group: Group, sent_bytes: float, copies: int, eff: Efficiency) -> float:
    """Each rank spreads `sent_bytes`, `copies` of each token, evenly over the group.

    With copies above 1 a token crosses to a domain once, however many of its experts are there, and is copied
    inside (DeepEP, arXiv:2412.19437): of d domains it reaches (d-1) (1 - (1 - 1/d)^copies) others on average.
    """
    if group.size <= 1 or sent_bytes <= 0:
        return 0.0
    inside = sent_bytes * (group.per_domain - 1) / group.size / (group.link_bytes_per_s * eff.all_to_all)
    crossings = (group.size - group.per_domain) / group.size * copies
    domains = group.domains
    if copies > 1 and domains > 1:
        crossings = min(crossings, (domains - 1) * (1 - (1 - 1 / domains) ** copies))
    outside = sent_bytes / copies * crossings / group.nic_bytes_per_s
    return latency_s(group, eff) + max(inside, outside)


def send_s(group: Group, message_bytes: float, eff: Efficiency) -> float:
    """Seconds of sending `message_bytes` to a neighbour on the axis."""
    if group.size <= 1:
        return 0.0
    bandwidth = group.nic_bytes_per_s if group.crosses and group.per_domain == 1 else group.link_bytes_per_s
    return eff.collective_latency_s + message_bytes / bandwidth
