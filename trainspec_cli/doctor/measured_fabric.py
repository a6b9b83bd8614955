"""Measured links between nodes -> the network as a recipe describes it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from statistics import median

from trainspec_cli.spec.recipe.fabric import TierSpec
from trainspec_cli.spec.results.doctor import Check
from trainspec_cli.spec.results.tools import PairRate

APART = 2.0
"""Links of nodes that share a switch and of nodes that do not differ by this factor, or cannot be told apart."""

EFFICIENCY = "cluster.efficiency={nic: 1}"
"""The values that a plan with measured rates is given: they are what collectives reach."""


def check_fabric(pairs: Sequence[PairRate], devices_per_node: int, nics_per_node: int) -> Iterator[Check]:
    """Say which tiers the measured links would be; nothing without links."""
    if not pairs:
        return
    groups = nodes_near_one_another(pairs)
    tiers = ",".join(map(_written, measured_tiers(pairs, groups, devices_per_node, nics_per_node)))
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
    return replace(tier, gbit_per_s=_short(gbit_per_s), latency_us=_short(latency_us), kind="measured")


def _short(figure: float) -> float:
    return float(f"{figure:.3g}")


def _written(tier: TierSpec) -> str:
    size = f"devices: {tier.devices}," if tier.devices else ""
    rates = f"gbit_per_s: {tier.gbit_per_s:g},latency_us: {tier.latency_us:g}"
    return f"{{name: {tier.name},{size}{rates},kind: {tier.kind}}}"


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
        groups = _joined(hosts, [pair for pair in pairs if quantity(pair) < math.sqrt(least * most)])
        near = [quantity(pair) for pair in pairs if any(set(pair.hosts) <= group for group in groups)]
        far = [quantity(pair) for pair in pairs if not any(set(pair.hosts) <= group for group in groups)]
        alike = len({len(group) for group in groups}) == 1
        consecutive = [host for group in groups for host in hosts if host in group] == hosts
        if near and far and alike and consecutive and max(near) * math.sqrt(APART) < min(far):
            return groups
    return None


def _joined(hosts: Sequence[str], near: Collection[PairRate]) -> list[set[str]]:
    """Return the sets of nodes that a chain of near pairs joins."""
    groups = [{host} for host in hosts]
    for pair in near:
        first, second = (next(group for group in groups if host in group) for host in pair.hosts)
        if first is not second:
            first |= second
            groups.remove(second)
    return groups
