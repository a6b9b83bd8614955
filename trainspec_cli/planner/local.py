"""Predicts a run on this machine's CPU from a probe of it: step time and memory."""

from __future__ import annotations

from trainspec_cli.planner.memory.local import peak_memory
from trainspec_cli.planner.time.local import step_parts_s
from trainspec_cli.spec.recipe.model import DecoderModel, ModelSpec
from trainspec_cli.spec.results.local import LocalPrediction
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.results.probe import MachineProbe

DEPARTURES = (
    *("gated_mlp", "activation", "gate_limit", "learned_positions", "sliding_window", "mla", "experts"),
    *("prediction_layers", "attention_bias", "qk_norm", "attention_sinks"),
)
"""Fields of a decoder by which its arithmetic is another than the llama's."""


def is_predictable(plan: Plan) -> bool:
    """A probe speaks of llamas on the CPU, trained whole, whose blocks are eager, kept whole, and spread by data
    parallelism alone."""
    layout = plan.layout
    whole = (layout.cp, layout.tp, layout.pp, layout.ep) == (1, 1, 1, 1)
    eager = not plan.spec.compile and plan.recompute == "none" and plan.offload == "none"
    trained = plan.device == "cpu" and plan.num_nodes == 1 and not plan.spec.lora.rank
    return trained and whole and eager and is_llama(plan.spec.model)


def is_llama(model: ModelSpec) -> bool:
    """A decoder that departs from the llama in nothing but its sizes and positions."""
    if not isinstance(model, DecoderModel):
        return False
    plain = {name: DecoderModel.__dataclass_fields__[name].default for name in DEPARTURES}
    return all(getattr(model, name) == value for name, value in plain.items())


def predict_local(plan: Plan, probe: MachineProbe) -> LocalPrediction:
    """Predict a plan that `is_predictable`."""
    model = plan.spec.model
    assert isinstance(model, DecoderModel), "other families are not predictable"
    return LocalPrediction(time_s=step_parts_s(plan, model, probe), memory=peak_memory(plan, model, probe))
