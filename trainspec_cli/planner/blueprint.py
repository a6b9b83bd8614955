"""Predict the time of an exchange with each algorithm (alpha-beta model), and choose the best one.

A hierarchical all-reduce of S bytes over g ranks inside each of n elements takes 2 (g-1)/g S/B_in + 2 (n-1)/n S/(g
B_out) plus the latency of each step (Thakur et al. 2005 for each tier). A flat ring takes 2 (N-1)/N S divided by the
rate of rings through the slowest tier, plus a latency for each of its 2 (N-1) steps. A double binary tree (Sanders et
al. 2009) sends all bytes up and down, and its latency grows logarithmically."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

from trainspec_cli.planner.hardware.cluster import (
    Fabric,
    Group,
    all_gather_s,
    all_to_all_s,
    axis_groups,
    group_with,
    reduce_scatter_s,
    send_s,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.setup import Setup
from trainspec_cli.planner.time.step import MicroBatch, assemble_step, micro_batch, rank_parts
from trainspec_cli.planner.workload import layer_works
from trainspec_cli.recipe.keys.cluster import FabricSpec
from trainspec_cli.recipe.keys.layout import MESH_AXES, Layout
from trainspec_cli.recipe.results.blueprint import (
    Algorithm,
    Blueprint,
    BlueprintTier,
    Exchange,
    Operation,
    Setting,
    TunerRow,
)

PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""Number of times that all bytes travel around the ring."""
TREE_RATE = 0.92
"""A tree's bandwidth relative to a ring's, as in NCCL (NVIDIA/nccl src/graph/tuning.cc)."""


@dataclass(frozen=True)
class Level:
    """One tier of a multi-tier algorithm."""

    joined: int
    """Number of elements of the tier below that one element contains; for the first tier, the number of ranks."""
    below: int
    """Number of the group's ranks inside an element of the tier below, which have already divided the bytes among
    themselves."""
    bytes_per_s: float
    """Bandwidth per device."""
    hop_s: float


def levels_of(group: Group, eff: Efficiency) -> list[Level]:
    """Return the tiers over which the group's ranks are spread, innermost first."""
    rates = (group.link_bytes_per_s, group.nic_bytes_per_s, *(tier.bytes_per_s for tier in group.outer))
    spans = ((group.per_domain, group.link_latency_s), *group.spans)
    insides = (1, group.per_domain, *(tier.ranks for tier in group.outer))
    parts = zip(spans, insides, rates, strict=True)
    levels = [
        Level(joined, below, rate, eff.hop_latency_s if hop_s is None else hop_s)
        for (joined, hop_s), below, rate in parts
    ]
    return [level for level in levels if level.joined > 1]


def times_of(group: Group, operation: Operation, message_bytes: float, eff: Efficiency) -> dict[Algorithm, float]:
    """Return the duration of one exchange in seconds with each applicable algorithm. The hierarchical algorithm needs
    several tiers."""
    if operation == "all_to_all":
        return {"direct": all_to_all_s(group, message_bytes, 1, eff)}
    if operation == "send":
        return {"direct": send_s(group, message_bytes, eff)}
    times: dict[Algorithm, float] = {}
    levels = levels_of(group, eff)
    passes = PASSES[operation]
    if not group.speaks_gloo:
        # Every step of a flat ring waits for its slowest hop.
        steps = group.size - 1
        hop_s = max((level.hop_s for level in levels), default=0.0)
        sent_s = message_bytes * steps / group.size / group.ring_bytes_per_s
        times["ring"] = eff.collective_latency_s + passes * (sent_s + steps * hop_s)
    elif operation == "all_gather":
        times["ring"] = all_gather_s(group, message_bytes, eff)
    else:
        times["direct"] = passes * reduce_scatter_s(group, message_bytes, eff)
    if len(levels) > 1:
        # The hierarchical algorithm runs a ring in each tier: first inside an element, then across elements, between
        # ranks at the same position, each with its part of the bytes. With gloo, the ranks of each tier exchange their
        # parts in one step.
        total_s = 0.0
        for level in levels:
            is_ring = not group.speaks_gloo and operation == "all_reduce" and level is levels[-1]
            steps = level.joined - 1
            sent_s = message_bytes / level.below * steps / level.joined / level.bytes_per_s
            hops = 1 if group.speaks_gloo else steps
            calls = 1 if is_ring else passes
            total_s += calls * eff.collective_latency_s + passes * (sent_s + hops * level.hop_s)
        times["hierarchical"] = total_s
    if operation == "all_reduce" and not group.speaks_gloo:
        # A tree consists of a chain inside each domain and a double binary tree over the domains; data goes up, then
        # down.
        hops_s = 0.0
        for level in levels:
            is_chain = level.below == 1 and group.per_domain > 1
            hops_s += (level.joined - 1 if is_chain else math.ceil(math.log2(level.joined))) * level.hop_s
        sent_s = message_bytes / (TREE_RATE * group.ring_bytes_per_s)
        times["tree"] = eff.collective_latency_s + 2 * (sent_s + hops_s)
    return times


def best_bucket_bytes(group: Group, operation: Operation, total_bytes: float, eff: Efficiency) -> float:
    """Return the bucket size b* = sqrt(S a B), limited to the total size. Larger buckets expose more of the last
    exchange, and smaller ones incur the latency a more often."""
    latency_s = min(times_of(group, operation, 1.0, eff).values())
    return min(total_bytes, math.sqrt(total_bytes * latency_s * group.ring_bytes_per_s))


def exchanges_of(
    setup: Setup, once: MicroBatch, groups: Mapping[str, Group], fabric: Fabric, eff: Efficiency
) -> tuple[Exchange, ...]:
    """Return the exchanges that the rank with the most parameters performs in a step, with the bytes, count and fastest
    algorithm of each."""
    layout = setup.layout
    found: list[Exchange] = []

    def add(axis: str, name: str, operation: Operation, size: float, per_step: float, *, buckets: bool = False) -> None:
        """`name`: the key of a group in `axis_groups`. `buckets`: whether these are gradients or parameters, which are
        exchanged in buckets during computation."""
        group = groups[name]
        if group.size <= 1 or size <= 0 or per_step <= 0:
            return
        bucket_bytes = best_bucket_bytes(group, operation, size, eff) if buckets else None
        message_bytes = bucket_bytes or size
        times = times_of(group, operation, message_bytes, eff)
        # Among equally fast algorithms, the first one is chosen: the flat ring, if available.
        algorithm = min(times, key=lambda one: times[one])
        found.append(
            Exchange(
                axis=axis,
                operation=operation,
                ranks=group.size,
                # The outermost tier that the group crosses.
                tier=fabric.network[len(group.outer)].name if group.crosses else "scale-up domain",
                message_bytes=message_bytes,
                per_step=per_step * size / message_bytes if buckets else per_step,
                algorithm=algorithm,
                time_s=times[algorithm],
                ring_s=times.get("ring", times.get("direct", times[algorithm])),
                bucket_bytes=bucket_bytes,
            )
        )

    # Exchanges of tensor, context and expert parallelism in the layers of an average pipeline rank, forward and
    # backward.
    works = [work for parts in layer_works(setup.model, setup.tokens, setup.seq_len, layout) for work in parts]
    times = setup.grad_accum / layout.pp
    size, number = _mean((work.tp_bytes, work.tp_exchanges) for work in works)
    add("tp", "tp", "all_reduce", size, 2 * times * number)
    size, number = _mean((work.cp_bytes, 1) for work in works)
    add("cp", "cp", "all_gather", size, 3 * times * number)
    size, number = _mean((work.ep_bytes, 1) for work in works)
    add("ep", "ep", "all_to_all", size, 4 * times * number)

    # Messages with activations and their gradients between pipeline stages.
    parts = layout.tp if layout.sequence_parallel or setup.software.split_sends else 1
    size = 2.0 * setup.tokens * setup.model.hidden_size / parts
    add("pp", "pp", "send", size, 2.0 * layout.virtual_stages * setup.grad_accum)

    # Exchanges of gradients and parameters on the pipeline rank with the most parameters.
    part = max((rank.whole for rank in rank_parts(once, layout)), key=lambda rank: rank.params)
    gradients = setup.trainable * setup.software.reduce_bytes
    weights = 2.0
    for params, expert in ((part.params, False), (part.expert_params, True)):
        label = " (experts)" if expert else ""
        group = "expert_dp" if expert else "dp"
        if layout.shards_parameters:
            shard = "expert_dp" if expert else "dp_shard"
            accum = setup.grad_accum
            gathered = weights * setup.sharded * params
            add(f"dp_shard{label}", shard, "all_gather", gathered, 2.0 * accum, buckets=True)
            add(f"dp_shard{label}", shard, "reduce_scatter", gradients * params, accum, buckets=True)
            if not expert:
                own = gradients * params / (layout.dp_shard * layout.cp)
                add("dp_replicate", "dp_replicate", "all_reduce", own, 1.0, buckets=True)
        elif layout.dp_shard == 1:
            add(f"dp{label}", group, "all_reduce", gradients * params, 1.0, buckets=True)
        else:
            add(f"dp{label}", group, "reduce_scatter", gradients * params, 1.0, buckets=True)
            add(f"dp{label}", group, "all_gather", setup.trainable * weights * params, 1.0, buckets=True)
    return tuple(found)


def _mean(messages: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """Return (mean bytes per message, number of messages) from (bytes, count) pairs, ignoring empty messages."""
    sent = [(size, number) for size, number in messages if size > 0]
    number = sum(number for _, number in sent)
    return (sum(size * times for size, times in sent) / number if number else 0.0), number


# Axis orders that can be produced by permuting entire nodes, and their groups.
#
# Ranks are numbered with tp innermost, then cp, dp_shard, dp_replicate, and pp outermost; a node has consecutive ranks.
# Reordering the axes outside a node only moves nodes: rank numbers, and thus the run, do not change.


@dataclass(frozen=True)
class Extent:
    """Consecutive ranks along one axis, or along a part of it."""

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
"""Group -> the axes along which its ranks differ."""
EXPERT_AXES = ("tp", "cp", "dp_shard")
"""Expert parallelism spans all of these axes, so they keep their order if there are experts."""


def usual_order(layout: Layout, per_node: int) -> tuple[Extent, ...] | None:
    """Return the axes with more than one rank, innermost first. An axis that crosses a node boundary is split in two.

    None if a node contains incomplete parts of an axis, because moving nodes would then not reorder axes."""
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
    """Yield the axis orders that can be produced by moving nodes, innermost first, starting with the usual one."""
    usual = usual_order(layout, per_node)
    if usual is None:
        return
    outside = _outside(usual, per_node)
    fixed = [extent for extent in outside if layout.ep > 1 and extent.axis in EXPERT_AXES]
    inside = (*usual[: len(usual) - len(outside)], *fixed)
    for outer in permutations(outside[len(fixed) :]):
        yield (*inside, *outer)


def groups_in(order: Sequence[Extent], layout: Layout, fabric: Fabric, eff: Efficiency) -> dict[str, Group]:
    """Return the groups of each axis for this order of the axes, which covers all ranks."""
    groups = axis_groups(layout, fabric, eff)
    for name, members in DENSE.items():
        groups[name] = group_with(fabric, groups[name].size, partial(_inside, order, members), eff)
    if layout.ep > 1:
        held = layout.expert_ranks
        block = layout.ep * layout.etp
        beyond = [extent for extent in order if extent.axis not in EXPERT_AXES]
        experts = [Extent("ep", block), Extent("expert_dp", held // block), *beyond]
        size = groups["expert_dp"].size
        groups["expert_dp"] = group_with(fabric, size, partial(_inside, experts, ("expert_dp", "dp_replicate")), eff)
    return groups


def _inside(order: Sequence[Extent], members: Sequence[str], devices: int) -> int:
    """Return how many of a group's ranks are inside an element with this many consecutive devices."""
    ranks = 1
    stride = 1
    for extent in order:
        if extent.axis in members:
            ranks *= min(extent.size, max(1, devices // stride))
        stride *= extent.size
    return ranks


def node_places(usual: Sequence[Extent], order: Sequence[Extent], per_node: int) -> tuple[int, ...]:
    """Return each node's position, by node number, among the nodes sorted by tier. Ranks within a node keep their
    order."""
    outside = _outside(usual, per_node)
    strides = {}
    stride = 1
    for extent in _outside(order, per_node):
        strides[extent] = stride
        stride *= extent.size
    places = []
    for node in range(stride):
        place = 0
        left = node
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


# The communication blueprint of a layout on a fabric; the same inputs give the same blueprint.


WORTH = 1e-3
"""Nodes are moved only if that saves at least this fraction of a step."""
NCCL_DOCS = "NVIDIA NCCL user guide, environment variables"
LARGEST_MESSAGE = 4_294_967_295
"""The largest size in the example tuner's table, which means "any size"."""
COLLECTIVES = ("broadcast", "reduce", "allgather", "reducescatter", "allreduce")
SMALLEST_TUNED = 2**10
LARGEST_TUNED = 2**32


@dataclass(frozen=True)
class _Placed:
    """A planned step with one order of the axes."""

    order: tuple[Extent, ...] | None
    """None if only the usual order is possible."""
    groups: Mapping[str, Group]
    once: MicroBatch
    step_s: float


def draw_blueprint(setup: Setup, spec: FabricSpec, eff: Efficiency) -> Blueprint:
    """Choose the order of the axes across the nodes that gives the shortest planned step, and the algorithm of each
    exchange.

    Another order replaces the usual one only if it is faster by at least a thousandth. No exchange is slower than with
    a flat ring."""
    fabric = setup.fabric
    layout = setup.layout
    tried = [_place(setup, order, eff) for order in orders(layout, fabric.devices_per_node)]
    usual = tried[0] if tried else _place(setup, None, eff)
    best = min(tried, key=lambda placed: placed.step_s, default=usual)
    if best.step_s > (1 - WORTH) * usual.step_s:
        best = usual
    exchanges = exchanges_of(setup, best.once, best.groups, fabric, eff)
    moved = best is not usual
    # The scale-up domain and the tiers above it, up to the one that contains every device.
    domain = ("scale-up domain", fabric.scaleup_devices, fabric.link_gb_per_s * 8)
    tiers: list[BlueprintTier] = []
    for name, devices, gbit_per_s in (domain, *((tier.name, tier.devices, tier.gbit_per_s) for tier in fabric.network)):
        elements = max(1, math.ceil(fabric.num_devices / devices))
        if not tiers or tiers[-1].elements > 1:
            tiers.append(BlueprintTier(name, elements, min(devices, fabric.num_devices), gbit_per_s))
    sizes = (fabric.scaleup_devices, *(tier.devices for tier in fabric.network))
    return Blueprint(
        fabric=fabric.name or ("of the recipe" if fabric.described else "flat"),
        tiers=tuple(tiers),
        order=_axes(best.order) if best.order else tuple(axis for axis in MESH_AXES if getattr(layout, axis) > 1),
        node_places=node_places(usual.order or (), best.order or (), fabric.devices_per_node) if moved else (),
        step_s=best.step_s,
        unplaced_step_s=usual.step_s,
        exchanges=exchanges,
        settings=tuple(_settings(fabric, spec)),
        tuner=tuple(_tuner_rows(fabric, best.groups, exchanges, eff)) if _has_nccl(fabric) else (),
        # The order of nodes matters if an element of a tier contains several nodes, but not all of them.
        sorts_nodes=any(fabric.devices_per_node < size < fabric.num_devices for size in sizes),
    )


def _place(setup: Setup, order: tuple[Extent, ...] | None, eff: Efficiency) -> _Placed:
    layout = setup.layout
    fabric = setup.fabric
    groups = axis_groups(layout, fabric, eff) if order is None else groups_in(order, layout, fabric, eff)
    once = micro_batch(setup, groups, eff)
    return _Placed(order, groups, once, assemble_step(setup, once, groups, eff).total_s)


def _axes(order: Sequence[Extent]) -> tuple[str, ...]:
    """Return the axes' names, outermost first. An axis that crosses a node boundary appears twice: for the part inside
    a node and for the part across nodes."""
    names = [extent.axis for extent in reversed(order)]
    return tuple(name for place, name in enumerate(names) if place == 0 or names[place - 1] != name)


def _has_nccl(fabric: Fabric) -> bool:
    return fabric.chip.vendor == "nvidia" and fabric.num_devices > fabric.devices_per_node


def _settings(fabric: Fabric, spec: FabricSpec) -> Iterator[Setting]:
    """Yield the variables that NCCL's documentation recommends for the described fabric. Nothing else is set."""
    if not _has_nccl(fabric):
        return
    if spec.nic_wiring == "rails":
        reason = "each NIC of a node is on its rail's switch, so rings and trees stay on their rail"
        yield Setting("NCCL_CROSS_NIC", "0", reason, f"{NCCL_DOCS}, NCCL_CROSS_NIC")
    if spec.nic_wiring == "one_switch":
        reason = "all NICs of a node are on one switch, so staying on one NIC does not avoid flow collisions"
        yield Setting("NCCL_CROSS_NIC", "1", reason, f"{NCCL_DOCS}, NCCL_CROSS_NIC")


def _tuner_rows(
    fabric: Fabric, groups: Mapping[str, Group], exchanges: Sequence[Exchange], eff: Efficiency
) -> Iterator[TunerRow]:
    """Yield rows for all-reduces across nodes: a tree up to the size where it stops being faster than the ring. The
    last row covers everything else with a ring, the example tuner's default."""
    nodes_per_domain = max(1, fabric.scaleup_devices // fabric.devices_per_node)
    seen: set[tuple[int, int]] = set()
    for exchange in exchanges:
        group = groups.get(exchange.axis)
        if exchange.operation != "all_reduce" or group is None or not group.crosses:
            continue
        # A scale-up domain may contain several nodes.
        nodes = min(group.size, group.domains * min(nodes_per_domain, group.per_domain))
        limit = tree_until_bytes(group, eff)
        if limit and (nodes, group.size) not in seen:
            seen.add((nodes, group.size))
            reason = f"planned: up to {limit:,} bytes, a tree is faster than a ring"
            yield TunerRow("allreduce", 0, limit, "tree", nodes, group.size, reason)
    if seen:
        for collective in COLLECTIVES:
            yield TunerRow(collective, 0, LARGEST_MESSAGE, "ring", -1, -1, "all else")


def tree_until_bytes(group: Group, eff: Efficiency) -> int:
    """Return the largest power-of-two size at which a tree is faster than a ring; 0 if it never is."""
    limit = 0
    size = SMALLEST_TUNED
    while size < LARGEST_TUNED:
        times = times_of(group, "all_reduce", float(size), eff)
        if times["tree"] >= times["ring"]:
            break
        limit = size
        size *= 2
    return limit
