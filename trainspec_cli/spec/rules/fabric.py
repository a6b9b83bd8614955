"""Rules for the tiers of a network: each holds whole elements of the one below, and the last holds every device."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from trainspec_cli.errors import Problem
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.fabric import TierSpec

if TYPE_CHECKING:
    from trainspec_cli.spec.recipe.run import RunSpec

PATH = "cluster.fabric.tiers"


def tiers(spec: RunSpec) -> Iterator[Problem]:
    """A fabric has a scale-up domain and a network or more; sizes grow in whole multiples up to all devices."""
    described = spec.cluster.fabric.tiers
    if len(described) == 1:
        message = f"`{PATH}` has one tier, `{described[0].name}`; the scale-up domain and a network are needed"
        yield Problem("missing_value", message, PATH, "add the tier that joins the domains, or type fabric=flat")
    for place, tier in enumerate(described):
        if tier.devices is None and 0 < place < len(described) - 1:
            path = f"{PATH}.{place}.devices"
            message = f"`{path}` has no value; only the first tier and the last take it from the cluster"
            yield Problem("missing_value", message, path, "say how many devices one element of the tier holds")
    yield from _kind_of_links(described)
    yield from _sizes(described, spec)


def _kind_of_links(described: tuple[TierSpec, ...]) -> Iterator[Problem]:
    if described and described[0].kind is not None:
        path = f"{PATH}.0.kind"
        message = f"`{path}` is {described[0].kind}, and the first tier is the devices' own links"
        yield Problem("unsupported", message, path, "leave it out: cluster.accelerator.link_kind says what they are")


def _sizes(described: tuple[TierSpec, ...], spec: RunSpec) -> Iterator[Problem]:
    per_node = spec.cluster.devices_per_node
    known = [(place, tier.name, tier.devices) for place, tier in enumerate(described) if tier.devices is not None]
    domain = spec.cluster.scaleup_devices or (None if per_node == AUTO else per_node)
    if described and described[0].devices is None and domain is not None:
        known.insert(0, (0, described[0].name, domain))
    for (_, below, inner), (place, name, outer) in pairwise(known):
        if outer is None or inner is None or (outer > inner and outer % inner == 0):
            continue
        path = f"{PATH}.{place}.devices"
        message = f"`{path}` is {outer}; `{name}` holds two or more whole elements of `{below}`, which has {inner}"
        yield Problem("not_divisible", message, path, f"type a multiple of {inner}, such as {_near(outer, inner)}")
    if described and described[-1].devices is not None and per_node != AUTO:
        wanted = spec.cluster.num_nodes * per_node
        if described[-1].devices < wanted:
            path = f"{PATH}.{len(described) - 1}.devices"
            message = f"`{path}` is {described[-1].devices}, and the cluster has {wanted} devices"
            hint = f"type {wanted} or more, or null for all of them, or add the tier that joins these"
            yield Problem("out_of_range", message, path, hint)


def _near(outer: int, inner: int) -> int:
    return inner * max(2, round(outer / inner))


FABRIC_RULES = (tiers,)
