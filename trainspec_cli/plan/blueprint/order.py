"""Which axes lie next to one another on the nodes: orders that permuting whole nodes can make, and their groups.

Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate, and pp outermost; a node has consecutive ones.
Where the axes outside of a node change places, only nodes move: rank numbers, and so the run, stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Fabric, Group, axis_groups, group_with
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout


@dataclass(frozen=True)
class Extent:
    """A run of ranks along one axis, or along a part of it."""

    axis: str
    size: int


DENSE = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("cp", "dp_shard", "dp_replicate"),
    "dp_shard": ("cp", "dp_shard"),
    "dp_replicate": ("dp_replicate",),
    "pp": ("pp",),
}
"""Group -> the axes that its ranks differ in."""
EXPERT_AXES = ("tp", "cp", "dp_shard")
"""Expert parallelism is laid over these together: with experts they keep their order."""


def usual_order(layout: Layout, per_node: int) -> tuple[Extent, ...] | None:
    """Return the axes of more than one rank, innermost first; one that a node's edge cuts comes in two parts.

    None where a node holds no whole part of an axis, so that moving nodes would not move axes.
    """
    order: list[Extent] = []
    left = per_node
    for axis in reversed(MESH_AXES):
        size = getattr(layout, axis)
        held = math.gcd(size, left)
        if held < min(size, left):
            return None
        order += [Extent(axis, part) for part in (held, size // held) if part > 1]
        left //= held
    return tuple(order)


def orders(layout: Layout, per_node: int) -> Iterator[tuple[Extent, ...]]:
    """Yield the orders of the axes that moving nodes can make, innermost first; the usual one comes first."""
    usual = usual_order(layout, per_node)
    if usual is None:
        return
    outside = _outside(usual, per_node)
    fixed = [extent for extent in outside if layout.ep > 1 and extent.axis in EXPERT_AXES]
    inside = (*usual[: len(usual) - len(outside)], *fixed)
    for outer in permutations(outside[len(fixed) :]):
        yield (*inside, *outer)


def groups_in(order: Sequence[Extent], layout: Layout, fabric: Fabric, eff: Efficiency) -> dict[str, Group]:
    """Return the groups of each axis where the axes lie in this order, which has every rank."""
    groups = axis_groups(layout, fabric, eff)
    for name, members in DENSE.items():
        groups[name] = group_with(fabric, groups[name].size, partial(_inside, order, members), eff)
    if layout.ep > 1:
        held, block = layout.expert_ranks, layout.ep * layout.etp
        beyond = [extent for extent in order if extent.axis not in EXPERT_AXES]
        experts = [Extent("ep", block), Extent("expert_dp", held // block), *beyond]
        size = groups["expert_dp"].size
        groups["expert_dp"] = group_with(fabric, size, partial(_inside, experts, ("expert_dp", "dp_replicate")), eff)
    return groups


def _inside(order: Sequence[Extent], members: Sequence[str], devices: int) -> int:
    """Ranks of a group inside an element of so many consecutive devices."""
    ranks, stride = 1, 1
    for extent in order:
        if extent.axis in members:
            ranks *= min(extent.size, max(1, devices // stride))
        stride *= extent.size
    return ranks


def node_places(usual: Sequence[Extent], order: Sequence[Extent], per_node: int) -> tuple[int, ...]:
    """Return for each node by its number its place among nodes sorted by tier; both orders are the same in a node."""
    outside = _outside(usual, per_node)
    strides, stride = {}, 1
    for extent in _outside(order, per_node):
        strides[extent] = stride
        stride *= extent.size
    places = []
    for node in range(stride):
        place, left = 0, node
        for extent in outside:
            left, coordinate = divmod(left, extent.size)
            place += coordinate * strides[extent]
        places.append(place)
    return tuple(places)


def _outside(order: Sequence[Extent], per_node: int) -> Sequence[Extent]:
    held = 1
    for place, extent in enumerate(order):
        if held == per_node:
            return order[place:]
        held *= extent.size
    return ()
