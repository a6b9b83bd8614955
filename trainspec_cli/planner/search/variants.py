"""A run planned other than as asked: on fewer nodes, with spares, or in replica groups."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.planner.capacity import describe_fabric, efficiency_of, find_fastest, plan_capacity
from trainspec_cli.planner.hardware.topology import Fabric
from trainspec_cli.planner.search.space import Space
from trainspec_cli.spec.auto import AUTO
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.layout import LayoutSpec
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate, CapacityPlan

ODD_PARTS = (1, 3, 5, 7, 9, 11, 13, 15)
"""Device counts that are tried are a power of two times one of these, which pipeline stages or the batch may take."""
TRIED = 4


def plan_on_what_divides(spec: RunSpec, machine: Machine | None = None) -> tuple[RunSpec, CapacityPlan]:
    """-> (`spec` on the nodes that work, its plan). Where no layout is legal on all nodes, the fastest of the largest
    counts of nodes on which one is; the others become spares."""
    fabric = describe_fabric(spec.cluster, machine)
    if any(True for _ in Space(spec, fabric.num_devices, fabric.scaleup_devices).layouts()):
        return spec, plan_capacity(spec, machine)
    smaller = [_leave_spares(spec, nodes) for nodes in _fewer_nodes(fabric, spec.cluster.num_nodes)]
    planned = [(changed, plan_capacity(changed, machine)) for changed in smaller]
    fitting = [(changed, plan) for changed, plan in planned if plan.best]
    if not fitting:
        return spec, plan_capacity(spec, machine)
    changed, plan = max(fitting, key=lambda pair: pair[1].best.tokens_per_s if pair[1].best else 0.0)
    return changed, replace(plan, assumptions=(_note(spec, changed), *plan.assumptions))


def _fewer_nodes(fabric: Fabric, num_nodes: int) -> list[int]:
    """Some counts below the cluster's own, the largest first."""
    return sorted(set(_counts(fabric.num_devices, fabric.devices_per_node)) - {num_nodes}, reverse=True)[:TRIED]


def _counts(devices: int, per_node: int) -> Iterator[int]:
    for odd in ODD_PARTS:
        count = odd
        while count * 2 <= devices:
            count *= 2
        if count <= devices and count % per_node == 0:
            yield count // per_node


def _leave_spares(spec: RunSpec, nodes: int) -> RunSpec:
    cluster = spec.cluster
    spares = (cluster.reliability.spare_nodes or 0) + cluster.num_nodes - nodes
    return replace(
        spec, cluster=replace(cluster, num_nodes=nodes, reliability=replace(cluster.reliability, spare_nodes=spares))
    )


def _note(spec: RunSpec, changed: RunSpec) -> str:
    left = spec.cluster.num_nodes - changed.cluster.num_nodes
    return (
        f"a batch of {spec.batching.global_batch_size:,} divides over no layout of all {spec.cluster.num_nodes:,} "
        f"nodes: {changed.cluster.num_nodes:,} work, {left:,} stand by as spares"
    )


def in_replica_groups(spec: RunSpec, machine: Machine | None, best: Candidate) -> Candidate | None:
    """`best` with its data parallelism cut into groups that each hold the whole state, the fastest that fits.

    None where it is in groups already, there is one node alone, or no group holds the state.
    """
    if spec.resilience.mode != "restart" or best.layout.dp_replicate > 1 or spec.cluster.num_nodes == 1:
        return None
    pinned = replace(
        spec,
        layout=_open_data_parallelism(spec.layout, best),
        recompute=best.recompute,  # type: ignore[arg-type]
        batching=replace(spec.batching, micro_batch_size=best.micro_batch_size),
        resilience=replace(spec.resilience, mode="elastic"),
    )
    return find_fastest(pinned, describe_fabric(pinned.cluster, machine), efficiency_of(pinned.cluster))


def _open_data_parallelism(wanted: LayoutSpec, best: Candidate) -> LayoutSpec:
    layout = best.layout
    return replace(
        wanted,
        dp_replicate=AUTO,
        dp_shard=AUTO,
        zero_stage=AUTO,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        ep=layout.ep,
        etp=layout.etp,
        pipeline_schedule=layout.pipeline_schedule,
        virtual_stages=layout.virtual_stages,
    )
