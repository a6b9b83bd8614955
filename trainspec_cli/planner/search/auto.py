"""`layout=auto` on GPUs at hand: the fastest layout of the whole search that fits and that the engine runs."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.planner.hardware.detected import chip_of
from trainspec_cli.policy.batch.division import micro_batches_of
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.layout import Layout, LayoutSpec
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.prediction import Candidate, CapacityPlan
from trainspec_cli.spec.rules.elastic import wanted_groups
from trainspec_cli.spec.rules.engine import check_built

TRIED = 64
"""The number of the fastest layouts that are tried; the planner knows some that the engine does not run."""


def is_searched(spec: RunSpec, machine: Machine, device: str) -> bool:
    """An axis is open, and the chip of the GPUs that were found is known."""
    layout = spec.layout
    axes = (layout.cp, layout.tp, layout.pp, layout.ep, layout.dp_shard, layout.dp_replicate)
    return device == "cuda" and AUTO in axes and chip_of(machine)[0] is not None


def best_candidate(spec: RunSpec, machine: Machine, num_devices: int) -> Candidate | None:
    """Return the best candidate, with the micro-batches of the run's first step; None where nothing fits."""
    cluster = replace(spec.cluster, accelerator=None, devices_per_node=num_devices)
    found = plan_capacity(replace(spec, cluster=cluster), machine, shown=TRIED).candidates
    best = next((candidate for candidate in found if candidate.fits and is_run(candidate, spec)), None)
    return best and replace(best, grad_accum_steps=_first_micro_batches(spec, best))


def _first_micro_batches(spec: RunSpec, candidate: Candidate) -> int:
    """Return the micro-batches of the run's first step: a candidate has those of its main size."""
    return micro_batches_of(candidate.layout, candidate.micro_batch_size, spec.batching.global_batch_size)


def replica_groups_of(spec: RunSpec, candidate: Candidate) -> int:
    """Return the replica groups that the run would have in this layout."""
    groups = wanted_groups(spec)
    return candidate.layout.dp_replicate if spec.resilience.replica_groups == AUTO and groups > 1 else groups


def as_plan(spec: RunSpec, candidate: Candidate, capacity: CapacityPlan, compute: Literal["bf16", "fp32"]) -> Plan:
    """A candidate as the engine would be given it."""
    nodes = spec.cluster.num_nodes
    return Plan(
        spec=spec,
        layout=candidate.layout,
        device="cuda",
        num_nodes=nodes,
        devices_per_node=capacity.world_size // nodes,
        compute=compute,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=_first_micro_batches(spec, candidate),
        recompute=candidate.recompute,  # type: ignore[arg-type]
        offload="none" if spec.offload == AUTO else spec.offload,
        params=capacity.params,
        flops_per_token=capacity.flops_per_token,
    )


def is_run(candidate: Candidate, spec: RunSpec) -> bool:
    return not check_built(pin_layout(spec, candidate.layout))


def pin_layout(spec: RunSpec, layout: Layout) -> RunSpec:
    """Return the recipe as it would be with this layout asked for."""
    pinned = {field.name: getattr(layout, field.name) for field in fields(LayoutSpec)}
    return replace(spec, layout=LayoutSpec(**pinned))
