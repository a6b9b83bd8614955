"""Time of an exchange by each algorithm that there is for it (alpha-beta model), and the best of them.

S bytes over g ranks inside an element and n elements take 2 (g-1)/g S/B_in + 2 (n-1)/n S/(g B_out) and the steps'
latencies as a hierarchical all-reduce (Thakur et al. 2005 for each tier). A flat ring takes 2 (N-1)/N S over the rate
of rings through the narrowest tier, and a latency for each of its 2 (N-1) steps. A double binary tree (Sanders et al.
2009) sends all bytes up and down, and its latency grows with the logarithm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.plan.hardware.collectives import all_gather_s, all_to_all_s, reduce_scatter_s, send_s
from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Group
from trainspec_cli.recipe.results.blueprint import Algorithm, Operation

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Times that a ring sends all bytes around."""

TREE_RATE = 0.92
"""A tree's bandwidth over a ring's, as NCCL itself takes it (NVIDIA/nccl src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Level:
    """One tier as an algorithm of several tiers meets it."""

    joined: int
    """Elements of the tier below that one element joins; ranks in the first tier."""
    below: int
    """Ranks of the group inside an element of the tier below, among which the bytes are already shared out."""
    bytes_per_s: float
    """Bandwidth of one device."""
    hop_s: float


def levels_of(group: Group, eff: Efficiency) -> list[Level]:
    """Return the tiers that the group's ranks are spread over, innermost first."""
    rates = (group.link_bytes_per_s, group.nic_bytes_per_s, *(tier.bytes_per_s for tier in group.outer))
    spans = ((group.per_domain, group.link_latency_s), *group.spans)
    insides = (1, group.per_domain, *(tier.ranks for tier in group.outer))
    parts = zip(spans, insides, rates, strict=True)
    levels = [
        Level(joined, below, rate, eff.hop_latency_s if hop_s is None else hop_s)
        for (joined, hop_s), below, rate in parts
    ]
    return [level for level in levels if level.joined > 1]


def ring_s(group: Group, operation: Operation, message_bytes: float, eff: Efficiency) -> float:
    """Every step of a flat ring waits for its slowest hop."""
    passes, steps = PASSES[operation], group.size - 1
    hop_s = max((level.hop_s for level in levels_of(group, eff)), default=0.0)
    sent_s = message_bytes * steps / group.size / group.ring_bytes_per_s
    return eff.collective_latency_s + passes * (sent_s + steps * hop_s)


def hierarchical_s(group: Group, operation: Operation, message_bytes: float, eff: Efficiency) -> float:
    """A ring in each tier: inside, then among the ranks of one number in each element, on their share of the bytes.

    On gloo each tier's ranks send each other their rows, in one step.
    """
    passes, total_s = PASSES[operation], 0.0
    levels = levels_of(group, eff)
    for level in levels:
        is_ring = not group.speaks_gloo and operation == "all_reduce" and level is levels[-1]
        steps = level.joined - 1
        sent_s = message_bytes / level.below * steps / level.joined / level.bytes_per_s
        hops = 1 if group.speaks_gloo else steps
        calls = 1 if is_ring else passes
        total_s += calls * eff.collective_latency_s + passes * (sent_s + hops * level.hop_s)
    return total_s


def tree_s(group: Group, message_bytes: float, eff: Efficiency) -> float:
    """A chain inside each domain and a double binary tree over the domains, up and down."""
    hops_s = 0.0
    for level in levels_of(group, eff):
        depth = level.joined - 1 if level.below == 1 and group.per_domain > 1 else math.ceil(math.log2(level.joined))
        hops_s += depth * level.hop_s
    return eff.collective_latency_s + 2 * (message_bytes / (TREE_RATE * group.ring_bytes_per_s) + hops_s)


def times_of(group: Group, operation: Operation, message_bytes: float, eff: Efficiency) -> dict[Algorithm, float]:
    """Seconds of one exchange by each algorithm that can make it. Several tiers are what a hierarchy needs."""
    if operation == "all_to_all":
        return {"direct": all_to_all_s(group, message_bytes, 1, eff)}
    if operation == "send":
        return {"direct": send_s(group, message_bytes, eff)}
    times: dict[Algorithm, float] = {}
    if not group.speaks_gloo:
        times["ring"] = ring_s(group, operation, message_bytes, eff)
    elif operation == "all_gather":
        times["ring"] = all_gather_s(group, message_bytes, eff)
    else:
        times["direct"] = PASSES[operation] * reduce_scatter_s(group, message_bytes, eff)
    if len(levels_of(group, eff)) > 1:
        times["hierarchical"] = hierarchical_s(group, operation, message_bytes, eff)
    if operation == "all_reduce" and not group.speaks_gloo:
        times["tree"] = tree_s(group, message_bytes, eff)
    return times


def fastest(times: dict[Algorithm, float]) -> Algorithm:
    """Return the fastest algorithm; of equals the first, which is the flat ring where there is one."""
    return min(times, key=lambda name: times[name])


def best_bucket_bytes(group: Group, operation: Operation, total_bytes: float, eff: Efficiency) -> float:
    """Return b* = sqrt(S a B): larger buckets leave more of the last one uncovered, smaller ones pay the latency a more
    often. Never more than all bytes."""
    latency_s = min(times_of(group, operation, 1.0, eff).values())
    return min(total_bytes, math.sqrt(total_bytes * latency_s * group.ring_bytes_per_s))
