"""Predicts a run on this machine's CPU from a probe of it: step time, memory, whether it fits, and what would."""

from __future__ import annotations

from dataclasses import replace

from trainspec_cli.planner.local_memory import peak_memory
from trainspec_cli.planner.local_time import step_parts_s
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.local import LocalPrediction
from trainspec_cli.spec.model import DecoderModel
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import MachineProbe


def is_predictable(plan: Plan) -> bool:
    """No probe speaks of GPUs, of other families of models, or of compiled blocks."""
    return plan.device == "cpu" and not plan.spec.compile and isinstance(plan.spec.model, DecoderModel)


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Of a plan that `is_predictable`."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(time_s=step_parts_s(plan, model, probe), memory=peak_memory(plan, model, probe))


def fits(prediction: LocalPrediction, plan: Plan, memory_bytes: float) -> bool:
    """All processes share the machine's memory."""
    return prediction.peak_memory_bytes * plan.devices_per_node <= memory_bytes


def suggest(plan: Plan, probe: MachineProbe, memory_bytes: float) -> str:
    """The first change, of those that keep the result the same, with which the plan fits; "" where none does."""
    per_rank = plan.micro_batch_size * plan.grad_accum_steps
    sharded = Layout(dp_shard=plan.world_size)
    for layout, words in ((plan.layout, ""), (sharded, f"layout.dp_shard={plan.world_size}")):
        for micro in (size for size in range(plan.micro_batch_size, 0, -1) if per_rank % size == 0):
            other = replace(plan, layout=layout, micro_batch_size=micro, grad_accum_steps=per_rank // micro)
            prediction = predict_local(other, probe)
            if fits(prediction, other, memory_bytes):
                return " ".join(filter(None, (words, f"batching.micro_batch_size={micro}")))
    return ""
