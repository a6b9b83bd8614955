"""The recipe of a plan's best layout, which the configuration of another engine describes."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.planner.capacity import asked_for
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.session.planning.plan import require_fit


def resolved(planned: PlanReport) -> RunSpec:
    """Return the recipe with every `auto` replaced by the value in the plan's best layout. Raises PlanError."""
    best = require_fit(planned)
    assert planned.run is not None, "a layout that fits has a forecast"
    # The layout covers all replica groups together, because other engines do not have them.
    spec = replace(planned.spec, layout=asked_for(best.layout))
    chip = spec.cluster.accelerator
    device = spec.cluster.device
    if device == AUTO:
        device = "cpu" if chip and chip.vendor == "cpu" else "cuda"
    compute = spec.precision.compute
    if compute == AUTO:  # the format that the plan assumes
        compute = "bf16" if chip and chip.bf16_tflops else "fp16"
    per_node = planned.capacity.world_size // spec.cluster.num_nodes
    cluster = replace(spec.cluster, devices_per_node=per_node, device=device)
    checkpoint = spec.checkpoint
    if checkpoint.interval_steps == AUTO:
        checkpoint = replace(checkpoint, interval_steps=planned.run.goodput.checkpoint_interval_steps)
    return replace(
        spec,
        cluster=cluster,
        checkpoint=checkpoint,
        batching=replace(spec.batching, micro_batch_size=best.micro_batch_size),
        recompute=best.recompute,  # type: ignore[arg-type]
        offload=best.offload,
        precision=replace(spec.precision, compute=compute),
        comm=replace(spec.comm, gradients=spec.comm.fixed.gradients),
    )
