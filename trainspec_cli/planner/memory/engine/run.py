"""What a step's memory follows from, and whether it can be counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.lora import LoraSpec
from trainspec_cli.spec.recipe.model import ConvModel, ModelSpec
from trainspec_cli.spec.recipe.run import Recompute
from trainspec_cli.spec.results.plan import Plan

WIDTHS = {"bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}


@dataclass(frozen=True)
class EnginePeak:
    """Bytes of tensors at the fullest moment of a step."""

    by_cause: dict[str, float]

    @property
    def total_bytes(self) -> float:
        return sum(self.by_cause.values())


@dataclass(frozen=True)
class EngineRun:
    model: ModelSpec
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
    lora: LoraSpec = field(default_factory=LoraSpec)


def run_of(plan: Plan) -> EngineRun:
    model, spec = plan.spec.model, plan.spec
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
        spec.lora,
    )


def is_counted(model: ModelSpec, offload: str) -> bool:
    """What the engine builds, where nothing is offloaded."""
    if isinstance(model, ConvModel) and model.architecture not in ("resnet", "unet"):
        return False
    return offload == "none" and not getattr(model, "prediction_layers", 0)
