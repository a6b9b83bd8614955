"""What a step's memory follows from, and whether it can be counted."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.engine_memory.shape import TextModel
from trainspec_cli.spec.layout import Layout
from trainspec_cli.spec.model import DecoderModel, HybridModel, ModelSpec
from trainspec_cli.spec.plan import Plan
from trainspec_cli.spec.run import Recompute


@dataclass(frozen=True)
class EnginePeak:
    """Bytes of tensors at the fullest moment of a step."""

    by_cause: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.by_cause.values())


@dataclass(frozen=True)
class EngineRun:
    model: TextModel
    layout: Layout
    seq_len: int
    samples: int
    """Of a micro-batch."""
    micro_batches: int
    compute: str
    reduce: str
    recompute: Recompute
    optimizer: str
    matmul: str = "compute"


def run_of(plan: Plan) -> EngineRun:
    model, spec = plan.spec.model, plan.spec
    assert isinstance(model, DecoderModel | HybridModel)
    return EngineRun(
        model,
        plan.layout,
        spec.data.seq_len,
        plan.micro_batch_size,
        plan.grad_accum_steps,
        plan.compute,
        spec.precision.reduce,
        plan.recompute,
        spec.optim.name,
        spec.precision.matmul,
    )


def is_counted(model: ModelSpec, offload: str) -> bool:
    """What the engine builds, but for convolutions and offloading."""
    if not isinstance(model, DecoderModel | HybridModel) or offload != "none":
        return False
    return not getattr(model, "prediction_layers", 0)
