"""Predicts a run on this machine's CPU from a probe of it: step time and memory."""

from __future__ import annotations

from trainspec_cli.planner.local_memory import peak_memory
from trainspec_cli.planner.local_time import step_parts_s
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
