"""`layout=auto` on GPUs at hand: the layout that `plan` puts first, as the engine is given it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Literal

from trainspec_cli.balance.batch.division import micro_batches_of
from trainspec_cli.planner.capacity import plan_best
from trainspec_cli.planner.hardware.cluster import chip_of
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, Plan


def is_searched(spec: RunSpec, machine: Machine, device: str) -> bool:
    """Something that the planner chooses is open, and the chip of the GPUs that were found is known."""
    choices = (*vars(spec.layout).values(), spec.batching.micro_batch_size, spec.recompute, spec.offload)
    return device == "cuda" and AUTO in choices and chip_of(machine)[0] is not None


def best_candidate(spec: RunSpec, machine: Machine, num_devices: int) -> Candidate | None:
    """Return the candidate that `plan` puts first, with the micro-batches of the run's first step; None where nothing
    fits."""
    cluster = replace(spec.cluster, accelerator=None, devices_per_node=num_devices)
    best = plan_best(replace(spec, cluster=cluster), machine)
    return best and replace(best, grad_accum_steps=_first_micro_batches(spec, best))


def _first_micro_batches(spec: RunSpec, candidate: Candidate) -> int:
    """Return the micro-batches of the run's first step: a candidate has those of its main size."""
    return micro_batches_of(candidate.layout, candidate.micro_batch_size, spec.batching.global_batch_size)


def as_plan(spec: RunSpec, candidate: Candidate, capacity: CapacityPlan, compute: Literal["bf16", "fp32"]) -> Plan:
    """A candidate as the engine would be given it."""
    nodes = spec.cluster.num_nodes
    layout, groups = one_group(spec, candidate.layout)
    return Plan(
        spec=spec,
        layout=layout,
        replica_groups=groups,
        device="cuda",
        num_nodes=nodes,
        devices_per_node=capacity.world_size // nodes,
        compute=compute,
        micro_batch_size=candidate.micro_batch_size,
        grad_accum_steps=_first_micro_batches(spec, candidate),
        recompute=candidate.recompute,  # type: ignore[arg-type]
        offload=candidate.offload,
        comm=spec.comm.fixed,
        params=capacity.params,
        adapter_params=capacity.adapter_params,
        flops_per_token=capacity.flops_per_token,
    )


def pin_layout(spec: RunSpec, layout: Layout) -> RunSpec:
    """Return the recipe as it would be with this layout of all replicas asked for."""
    layout, groups = one_group(spec, layout)
    resilience = replace(spec.resilience, replica_groups=groups) if groups > 1 else spec.resilience
    return replace(spec, layout=asked_for(layout), resilience=resilience)


def asked_for(layout: Layout) -> LayoutSpec:
    """Return a layout as a recipe asks for it."""
    return LayoutSpec(**{field.name: getattr(layout, field.name) for field in fields(LayoutSpec)})
