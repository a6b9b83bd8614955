"""A step of the engine as its memory follows from it: whether it can be counted, and the count of a rank's peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol, cast

from trainspec_cli.core.wings import Point
from trainspec_cli.plan.pipeline import cut_layers
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.lora import LoraSpec
from trainspec_cli.recipe.keys.model import ModelSpec, has_layer_list
from trainspec_cli.recipe.keys.model_parts import Layer
from trainspec_cli.recipe.keys.optim import KeptState
from trainspec_cli.recipe.keys.run import Recompute, RunSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.wings import parts_for

KEPT_BYTES: Point[float] = Point("kept_bytes")
"""Bytes that a wing keeps on the device for each trained parameter, sharded as the optimizer's state is."""
WIDTHS = {"bf16": 2.0, "fp16": 2.0, "tf32": 4.0, "fp32": 4.0, "fp64": 8.0}


@dataclass(frozen=True)
class EngineRun:
    model: ModelSpec
    layout: Layout
    seq_len: int
    samples: int
    """Samples of a micro-batch."""
    micro_batches: int
    compute: str
    reduce: str
    recompute: Recompute
    optimizer: KeptState
    matmul: str = "compute"
    lora: LoraSpec = field(default_factory=LoraSpec)
    compiled: bool = False
    """Blocks are compiled (torch.compile)."""
    outer_bytes: float = 0.0
    """Bytes that an outer optimizer keeps for each trained parameter (`KEPT_BYTES`)."""


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
        spec.optim.kept_state,
        spec.precision.matmul,
        spec.lora,
        spec.compile and fuses_countably(model, spec.lora, spec.precision.matmul, plan.compute),
        outer_bytes_of(spec),
    )


def outer_bytes_of(spec: RunSpec) -> float:
    """Return the bytes that the wings which a recipe uses keep for each trained parameter."""
    return sum(parts_for(KEPT_BYTES, spec), 0.0)


def is_counted(model: ModelSpec, offload: str) -> bool:
    """The engine builds the model, its family says how to count it, and nothing is offloaded."""
    return bool(model.record.memory) and model.is_built and offload == "none"


def fuses_countably(model: ModelSpec, lora: LoraSpec, matmul: str, compute: str) -> bool:
    """Return whether what a compiler fuses in the model's blocks is counted: those of whole attention and feed-forwards
    in one format, all trained. Other blocks' compiled graphs were not held against the count."""
    if not has_layer_list(model) or lora.rank or matmul not in ("compute", compute):
        return False
    layers = set(model.layer_list)
    plain = all(set(layer.mixers) <= {"attention", "feed_forward"} for layer in layers)
    return plain and all(layer.window is None for layer in layers) and not model.as_decoder.attention_sinks


def engine_peak(run: EngineRun, pipeline_rank: int) -> dict[str, float]:
    """Return the bytes by cause (`CAUSES`) at the fullest moment of one pipeline rank, where `is_counted`."""
    family = cast("FamilyMemory", import_module(run.model.record.memory))
    return family.replay(run, pipeline_rank)


class FamilyMemory(Protocol):
    """The functions of the module that a family's record names (`FamilyRecord.memory`)."""

    def replay(self, run: EngineRun, pipeline_rank: int) -> dict[str, float]:
        """Bytes by cause (`CAUSES`) at the fullest moment of a step on one rank of the pipeline."""


def rank_peaks(run: EngineRun) -> Iterator[dict[str, float]]:
    """Yield the peaks of all pipeline ranks.

    A rank that has no more layers of any kind than one before it holds no more than that one, which keeps them for more
    micro-batches, and is not counted by itself, unless it has the head.
    """
    counted: list[tuple[Counter[Layer], dict[str, float]]] = []
    for rank, layers in enumerate(_layers_of_ranks(run)):
        fuller = [peak for others, peak in counted if layers <= others]
        if fuller and rank < run.layout.pp - 1:
            yield fuller[0]
        else:
            counted.append((layers, engine_peak(run, rank)))
            yield counted[-1][1]


def _layers_of_ranks(run: EngineRun) -> list[Counter[Layer]]:
    """Layers of each kind on each rank of the pipeline."""
    if run.layout.pp == 1:
        return [Counter()]
    if not has_layer_list(run.model):  # no rank is known to hold as much as another one
        return [Counter({Layer((), rank): 1}) for rank in range(run.layout.pp)]
    layers = run.model.layer_list
    stages = cut_layers(len(layers), run.layout)
    return [
        Counter(layers[layer] for stage in run.layout.stages_of_rank(rank) for layer in stages[stage])
        for rank in range(run.layout.pp)
    ]


def tensors_by_cause(plan: Plan) -> dict[str, float] | None:
    """Bytes of the fullest stage's tensors, blocks eager; None where the engine's memory is not counted."""
    if not is_counted(plan.spec.model, plan.offload):
        return None
    return max(rank_peaks(run_of(plan)), key=lambda peak: sum(peak.values()))


CAUSES = ("parameters", "optimizer", "gradients", "gathered", "activations", "logits", "collectives", "temporaries")
"""Gradients: sharded ones, which the optimizer reads, and whole ones until they are exchanged. Collectives: the buffers
of data parallelism's exchanges, and pipelines' messages. Within a block's backward its own gradients count as
activations until it ends."""


class Account:
    def __init__(self) -> None:
        self.live = dict.fromkeys(CAUSES, 0.0)
        self.at_peak = dict(self.live)
        self._total = self._peak = 0.0

    def add(self, cause: str, size: float) -> None:
        self.live[cause] += size
        self._total += size
        if self._total > self._peak:
            self.touch(0.0)

    def touch(self, size: float, cause: str = "temporaries") -> None:
        """`size` more bytes are live for a moment."""
        if self._total + size > self._peak:
            self._peak = self._total + size
            self.at_peak = {**self.live, cause: self.live[cause] + size}
