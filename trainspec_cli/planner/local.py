"""Predicts a run on this machine's CPU from a probe of it: step time and memory."""

from __future__ import annotations

from trainspec_cli.planner.local_memory import peak_memory
from trainspec_cli.planner.local_time import step_parts_s
from trainspec_cli.spec.local import LocalPrediction
from trainspec_cli.spec.model import DecoderModel, ModelSpec
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.probe import MachineProbe


def is_predictable(plan: Plan) -> bool:
    """No probe speaks of GPUs, of models that are no plain llamas, of compiled blocks, or of axes but data's."""
    layout, model = plan.layout, plan.spec.model
    plain_run = plan.recompute == plan.offload == "none" and not plan.spec.compile
    along_data_alone = layout.data_parallel_size == layout.world_size and layout.ep == 1
    return plan.device == "cpu" and plain_run and along_data_alone and _is_plain(model)


def _is_plain(model: ModelSpec) -> bool:
    if not isinstance(model, DecoderModel):
        return False
    departs = (model.experts, model.mla, model.sliding_window, model.rope_scaling, model.learned_positions)
    flags = (model.qk_norm, model.attention_sinks, not model.gated_mlp, model.attention_bias != "none")
    return not any(departs) and not any(flags)


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Of a plan that `is_predictable`."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(time_s=step_parts_s(plan, model, probe), memory=peak_memory(plan, model, probe))
