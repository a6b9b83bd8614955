"""Rules for a network: each tier holds more than the one below, the last every device; planes join every NIC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.fabric import TierSpec

if TYPE_CHECKING:
    from trainspec_cli.recipe.keys.run import RunSpec

PATH = "cluster.fabric.tiers"


def tiers(spec: RunSpec) -> Iterator[Problem]:
    """A fabric has a scale-up domain and a network or more; sizes grow, in whole nodes, up to all devices."""
    described = spec.cluster.fabric.tiers
    if len(described) == 1:
        message = f"`{PATH}` has one tier, `{described[0].name}`; the scale-up domain and a network are needed"
        yield Problem("missing_value", message, PATH, "add the tier that joins the domains, or type fabric=flat")
    for place, tier in enumerate(described):
        if tier.devices is None and 0 < place < len(described) - 1:
            path = f"{PATH}.{place}.devices"
            message = f"`{path}` has no value; only the first tier and the last take it from the cluster"
            yield Problem("missing_value", message, path, "say how many devices one element of the tier holds")
    if described and described[0].kind is not None:
        path = f"{PATH}.0.kind"
        message = f"`{path}` is {described[0].kind}, and the first tier is the devices' own links"
        yield Problem("unsupported", message, path, "leave it out: cluster.accelerator.link_kind says what they are")
    yield from _sizes(described, spec)


def _sizes(described: tuple[TierSpec, ...], spec: RunSpec) -> Iterator[Problem]:
    per_node = spec.cluster.devices_per_node
    known = [(place, tier.name, tier.devices) for place, tier in enumerate(described) if tier.devices is not None]
    domain = spec.cluster.scaleup_devices or (None if per_node == AUTO else per_node)
    if described and described[0].devices is None and domain is not None:
        known.insert(0, (0, described[0].name, domain))
    whole = 1 if per_node == AUTO else per_node
    for (_, below, inner), (place, name, outer) in pairwise(known):
        if outer > inner and outer % whole == 0:
            continue
        path = f"{PATH}.{place}.devices"
        holds = f"`{name}` holds more than one of `{below}`, which has {inner}"
        message = f"`{path}` is {outer}; {holds}" + (f", and whole nodes of {whole}" if whole > 1 else "")
        near = whole * max(math.floor(inner / whole) + 1, round(outer / whole))
        yield Problem("not_divisible", message, path, f"type a multiple of {whole}, such as {near}")
    if described and described[-1].devices is not None and per_node != AUTO:
        wanted = spec.cluster.num_nodes * per_node
        if described[-1].devices < wanted:
            path = f"{PATH}.{len(described) - 1}.devices"
            message = f"`{path}` is {described[-1].devices}, and the cluster has {wanted} devices"
            hint = f"type {wanted} or more, or null for all of them, or add the tier that joins these"
            yield Problem("out_of_range", message, path, hint)


def network(spec: RunSpec) -> Iterator[Problem]:
    """Several nodes are joined by links that carry something."""
    cluster = spec.cluster
    described = cluster.fabric.tiers[1:]
    is_described = bool(described) and all(tier.gbit_per_s for tier in described)
    if cluster.nic_gbit_per_s == 0 and cluster.num_nodes > 1 and not is_described:
        path = "cluster.nic_gbit_per_s"
        message = f"`{path}` is 0, and {cluster.num_nodes} nodes exchange data over their NICs"
        hint = f"type {path}=400, or what a device has, in Gbit/s; null takes what is usual for the accelerator"
        yield Problem("out_of_range", message, path, hint)


def planes(spec: RunSpec) -> Iterator[Problem]:
    """A switch has a whole, even number of ports, half of which go up, and the tiers join every device's NIC."""
    found, per_node = spec.cluster.fabric.planes, spec.cluster.devices_per_node
    if found is None:
        return
    radix = found.switch_tbit_per_s * 1e3 * found.planes / found.nic_gbit_per_s
    if abs(radix - round(radix)) > 1e-6 or round(radix) % 2 or radix < 2:
        path = "cluster.fabric.planes.planes"
        message = (
            f"`{path}` is {found.planes}: a switch of {found.switch_tbit_per_s:g} Tbit/s would have {radix:g} ports of "
            f"{found.nic_gbit_per_s / found.planes:g} Gbit/s; a whole, even number is needed"
        )
        yield Problem("not_divisible", message, path, "choose planes, nic_gbit_per_s and switch_tbit_per_s that divide")
        return
    most = round(radix) ** found.switch_tiers // (2 if found.switch_tiers == 2 else 4)
    nics = None if per_node == AUTO else spec.cluster.num_nodes * per_node
    if nics is not None and nics > most:
        path = "cluster.fabric.planes.switch_tiers"
        message = f"`{path}` is {found.switch_tiers}, which join {most:,} NICs, and the cluster has {nics:,} devices"
        hint = f"type {path}=3" if found.switch_tiers == 2 else "choose more planes, or fewer nodes"
        yield Problem("out_of_range", message, path, hint)


FABRIC_RULES = (tiers, network, planes)
