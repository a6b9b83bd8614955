"""A layout on a fabric -> its communication blueprint. Pure: the same inputs give the same blueprint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.plan.blueprint.algorithms import times_of
from trainspec_cli.plan.blueprint.exchanges import exchanges_of
from trainspec_cli.plan.blueprint.order import Extent, groups_in, node_places, orders
from trainspec_cli.plan.hardware.rates import Efficiency
from trainspec_cli.plan.hardware.topology import Fabric, Group, axis_groups
from trainspec_cli.plan.setup import Setup
from trainspec_cli.plan.time.step import MicroBatch, assemble_step, micro_batch
from trainspec_cli.recipe.keys.fabric import FabricSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES
from trainspec_cli.recipe.results.blueprint import Blueprint, BlueprintTier, Exchange, Setting, TunerRow

WORTH = 1e-3
"""Nodes are moved for no smaller part of a step than this."""
NCCL_DOCS = "NVIDIA NCCL user guide, environment variables"
LARGEST_MESSAGE = 4_294_967_295
"""The largest size in the example tuner's table, which stands for all sizes."""
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
SMALLEST_TUNED, LARGEST_TUNED = 2**10, 2**32


@dataclass(frozen=True)
class _Placed:
    """The step where the axes lie in one order."""

    order: tuple[Extent, ...] | None
    """None: no other than the usual one can be made."""
    groups: Mapping[str, Group]
    once: MicroBatch
    step_s: float


def draw_blueprint(setup: Setup, spec: FabricSpec, eff: Efficiency) -> Blueprint:
    """Choose the order of the axes on the nodes with the shortest planned step, and each exchange's algorithm.

    The usual order stays unless another is faster by a thousandth; no exchange is slower than by a flat ring.
    """
    fabric, layout = setup.fabric, setup.layout
    tried = [_place(setup, order, eff) for order in orders(layout, fabric.devices_per_node)]
    usual = tried[0] if tried else _place(setup, None, eff)
    best = min(tried, key=lambda placed: placed.step_s, default=usual)
    if best.step_s > (1 - WORTH) * usual.step_s:
        best = usual
    exchanges = exchanges_of(setup, best.once, best.groups, fabric, eff)
    moved = best is not usual
    sizes = (fabric.scaleup_devices, *(tier.devices for tier in fabric.network))
    return Blueprint(
        fabric=fabric.name or ("of the recipe" if fabric.described else "flat"),
        tiers=tuple(_tiers(fabric)),
        order=_axes(best.order) if best.order else tuple(axis for axis in MESH_AXES if getattr(layout, axis) > 1),
        node_places=node_places(usual.order or (), best.order or (), fabric.devices_per_node) if moved else (),
        step_s=best.step_s,
        unplaced_step_s=usual.step_s,
        exchanges=exchanges,
        settings=tuple(_settings(fabric, spec)),
        tuner=tuple(_tuner_rows(fabric, best.groups, exchanges, eff)) if _has_nccl(fabric) else (),
        # The order of nodes matters where an element of a tier holds several of them, but not all.
        sorts_nodes=any(fabric.devices_per_node < size < fabric.num_devices for size in sizes),
    )


def _place(setup: Setup, order: tuple[Extent, ...] | None, eff: Efficiency) -> _Placed:
    layout, fabric = setup.layout, setup.fabric
    groups = axis_groups(layout, fabric, eff) if order is None else groups_in(order, layout, fabric, eff)
    once = micro_batch(setup, groups, eff)
    return _Placed(order, groups, once, assemble_step(setup, once, groups, eff).total_s)


def _axes(order: Sequence[Extent]) -> tuple[str, ...]:
    """Names, outermost first; an axis that a node cuts comes twice, for its part on a node and its part beyond."""
    names = [extent.axis for extent in reversed(order)]
    return tuple(name for place, name in enumerate(names) if place == 0 or names[place - 1] != name)


def _tiers(fabric: Fabric) -> Iterator[BlueprintTier]:
    """The scale-up domain and the tiers beyond, up to the one that holds every device."""
    domain = ("scale-up domain", fabric.scaleup_devices, fabric.link_gb_per_s * 8)
    for name, devices, gbit_per_s in (domain, *((tier.name, tier.devices, tier.gbit_per_s) for tier in fabric.network)):
        elements = max(1, math.ceil(fabric.num_devices / devices))
        yield BlueprintTier(name, elements, min(devices, fabric.num_devices), gbit_per_s)
        if elements == 1:
            return


def _has_nccl(fabric: Fabric) -> bool:
    return fabric.chip.vendor == "nvidia" and fabric.num_devices > fabric.devices_per_node


def _settings(fabric: Fabric, spec: FabricSpec) -> Iterator[Setting]:
    """Variables that NCCL's documentation ties to something the fabric says; nothing else is set."""
    if not _has_nccl(fabric):
        return
    if spec.nic_wiring == "rails":
        reason = "each NIC of a node is on a rail's own switch: rings and trees stay on their rail"
        yield Setting("NCCL_CROSS_NIC", "0", reason, f"{NCCL_DOCS}, NCCL_CROSS_NIC")
    if spec.nic_wiring == "one_switch":
        reason = "all NICs of a node are on one switch: staying on the same NIC avoids no flow collision"
        yield Setting("NCCL_CROSS_NIC", "1", reason, f"{NCCL_DOCS}, NCCL_CROSS_NIC")


def _tuner_rows(
    fabric: Fabric, groups: Mapping[str, Group], exchanges: Sequence[Exchange], eff: Efficiency
) -> Iterator[TunerRow]:
    """All-reduces across nodes: a tree up to the size from which the ring is faster. Then a row for all else, which the
    example tuner would set to the same: it forces the ring where no row fits."""
    seen: set[tuple[int, int]] = set()
    for exchange in exchanges:
        group = groups.get(exchange.axis)
        if exchange.operation != "all_reduce" or group is None or not group.crosses:
            continue
        key = (_nodes_of(group, fabric), group.size)
        limit = tree_until_bytes(group, eff)
        if limit and key not in seen:
            seen.add(key)
            reason = f"planned: up to {limit:,} bytes a tree's latency is less than a ring's"
            yield TunerRow("allreduce", 0, limit, "tree", *key, reason)
    if seen:
        for collective in COLLECTIVES:
            yield TunerRow(collective, 0, LARGEST_MESSAGE, "ring", -1, -1, "all else")


def _nodes_of(group: Group, fabric: Fabric) -> int:
    """Nodes that a group is spread over, where several may make one scale-up domain."""
    nodes_per_domain = max(1, fabric.scaleup_devices // fabric.devices_per_node)
    return min(group.size, group.domains * min(nodes_per_domain, group.per_domain))


def tree_until_bytes(group: Group, eff: Efficiency) -> int:
    """Return the largest power of two up to which a tree is faster than a ring; 0 where it never is."""
    limit, size = 0, SMALLEST_TUNED
    while size < LARGEST_TUNED:
        times = times_of(group, "all_reduce", float(size), eff)
        if times["tree"] >= times["ring"]:
            break
        limit = size
        size *= 2
    return limit
