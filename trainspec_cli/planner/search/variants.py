"""A run planned other than as asked: on fewer nodes, with spares, or with the other way of recovering."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainspec_cli.planner.capacity import plan_best, plan_capacity
from trainspec_cli.planner.hardware.cluster import describe_fabric
from trainspec_cli.planner.run.forecast import other_recovery
from trainspec_cli.planner.search.space import Space
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan

ODD_PARTS = (1, 3, 5, 7, 9, 11, 13, 15)
"""Device counts that are tried are a power of two times one of these, which pipeline stages or the batch may take."""
TRIED = 4


def plan_on_what_divides(spec: RunSpec, machine: Machine | None = None) -> tuple[RunSpec, CapacityPlan]:
    """-> (`spec` on the nodes that work, its plan). Where the batch divides evenly in no layout of all nodes, the
    fastest of all nodes and of the largest counts of nodes; those that do not work become spares."""
    fabric = describe_fabric(spec.cluster, machine)
    whole = plan_capacity(spec, machine)
    if Space(spec, fabric.num_devices, fabric.scaleup_devices).divides_evenly():
        return spec, whole
    counts = set(_counts(fabric.num_devices, fabric.devices_per_node)) - {spec.cluster.num_nodes}
    smaller = [_leave_spares(spec, nodes) for nodes in sorted(counts, reverse=True)[:TRIED]]
    planned = [(changed, plan_capacity(changed, machine)) for changed in smaller]
    changed, plan = max(((spec, whole), *planned), key=lambda pair: pair[1].best.tokens_per_s if pair[1].best else 0.0)
    if changed is spec:
        return spec, whole
    return changed, replace(plan, assumptions=(_note(spec, changed), *plan.assumptions))


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
    reliability = replace(cluster.reliability, spare_nodes=spares)
    return replace(spec, cluster=replace(cluster, num_nodes=nodes, reliability=reliability))


def _note(spec: RunSpec, changed: RunSpec) -> str:
    left = spec.cluster.num_nodes - changed.cluster.num_nodes
    return (
        f"a batch of {spec.batching.global_batch_size:,} divides evenly over no layout of all "
        f"{spec.cluster.num_nodes:,} nodes: {changed.cluster.num_nodes:,} work, {left:,} stand by as spares"
    )


def plan_other_recovery(spec: RunSpec, machine: Machine | None) -> Candidate | None:
    """Return the best layout of the same run where it recovers the other way: in replica groups that shrink and heal
    (`resilience=elastic`), or by a restart of all.

    What the recipe leaves open is searched again: each way has a best layout of its own. None on one node, where the
    recipe wants no recovery, and where nothing fits.
    """
    if spec.resilience.mode == "none" or spec.resilience.is_one_of_several or spec.cluster.num_nodes == 1:
        return None
    return plan_best(replace(spec, resilience=other_recovery(spec.resilience)), machine)
