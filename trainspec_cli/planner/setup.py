"""A run as input to the estimators, with every value resolved."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeVar

from trainspec_cli.core.printable import GIB
from trainspec_cli.planner.hardware.cluster import Fabric
from trainspec_cli.planner.memory.engine.units import block_matrices, block_unit, is_hidden, outside_unit, state_bytes
from trainspec_cli.planner.workload import expert_stacks
from trainspec_cli.recipe.keys.framework import FrameworkSpec, StateFacts, SumFormat
from trainspec_cli.recipe.keys.layout import Layout, Sharding
from trainspec_cli.recipe.keys.model import ModelSpec, TextModel, has_layer_list
from trainspec_cli.recipe.keys.training import BLOCK, KeptState, LoraSpec, OptimizerName, ParameterGroup, WireFormats

RecordT = TypeVar("RecordT", Layout, "Setup")


def changed(record: RecordT, **values: object) -> RecordT:
    """Return the record with changed values. This is four times as fast as `dataclasses.replace`, which matters because
    a search creates tens of thousands of records. It skips `__init__`, which is safe because the records have no
    checks."""
    made = object.__new__(type(record))
    vars(made).update(vars(record), **values)
    return made


@dataclass(frozen=True)
class Recompute:
    """The parts of the forward pass that the backward pass recomputes, and the fraction of layers that do so."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    layers: float = 1.0
    """Fraction of the layers that are recomputed."""

    @property
    def full(self) -> bool:
        return self.matmul >= 1.0


RECOMPUTE = {
    "none": Recompute(),
    "selective": Recompute(attention=1.0),
    "selective_op": Recompute(matmul=0.5, elementwise=1.0),
    "full": Recompute(1.0, 1.0, 1.0),
}
"""selective: the attention core is recomputed (arXiv:2205.05198). selective_op: every second matmul's output is
kept."""


@dataclass(frozen=True)
class Software:
    """The training framework's properties that affect time and memory. Fields without a docstring have the same meaning
    as those of the same name in `FrameworkSpec` and `StateFacts`, for compiled or eager blocks."""

    counted: bool = True
    fused_attention: bool = True
    attention_generation: int = 9
    fused_kernels: bool = True
    fused_loss: bool = False
    plain_loss: bool = False
    """True if the loss stays uncompiled even though the blocks are compiled."""
    cut_logit_bytes: float | None = None
    fused_accumulation: bool = True
    overlap_dp: bool = True
    overlap_tp: bool = True
    split_sends: bool = True
    grouped_experts: bool = True
    overlap_experts: bool = False
    expandable_segments: bool = False
    graphs: bool = False
    grad_bytes: float = 4.0
    """Bytes per value of a gradient during accumulation."""
    shards_states: bool = True
    """If True, state is sharded according to `zero_stage` over the ranks of dp_shard and cp. If False, each replica has
    the complete state (DDP)."""
    unshards_pipelines: bool = False
    reduce_bytes: float = 4.0
    """Bytes per value of an uncompressed gradient when it is sent."""
    wire: WireFormats = field(default_factory=WireFormats)
    """Wire formats of gradients and parameters."""
    master_bytes: float = 4.0
    optimizer: KeptState = "adamw"
    moment_bytes: float = 8.0
    """Bytes per parameter for the optimizer's moments."""
    bucket_bytes: float = 0.3 * GIB
    step_bytes: float = 0.0
    """Bytes per parameter for flat copies that the optimizer uses, which are too large to reuse activation memory."""
    step_temporary_bytes: float = 0.0
    model_groups: bool = False
    shifted_logits: bool = False
    weight_bytes: float = 2.0


@dataclass(frozen=True)
class Setup:
    """A model, its layout, and the hardware."""

    model: ModelSpec
    layout: Layout
    fabric: Fabric
    seq_len: int
    micro_batch_size: float
    grad_accum: int
    """Number of micro-batches per step."""
    compute: str = "bf16"
    matmul: str = "bf16"
    """Format of the linear layers: bf16, fp8, mxfp8, nvfp4, ..."""
    recompute: Recompute = field(default_factory=Recompute)
    software: Software = field(default_factory=Software)
    trainable: float = 1.0
    """Fraction of the parameters that have gradients. It is below 1 with adapters (LoRA), whose base needs no weight
    gradients."""
    sharded: float = 1.0
    """Fraction of the parameters that are sharded and gathered. It is below 1 if the adapters' base is quantised."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    groups: tuple[ParameterGroup, ...] = ()
    """Parameter groups, whose frozen parameters the memory of a step takes into account."""
    offload_optimizer: bool = False
    replica_groups: int = 1
    """Number of replica groups among the replicas of `layout`, which exchange gradients once per step; 0 if each
    replica is a group."""
    outer_bytes: float = 0.0
    """Bytes per trained parameter that an outer optimizer keeps."""
    tabled: bool = False
    """True if this is a row in a table of measured runs, timed in the same way as when the efficiencies were fitted.
    The positions of the layer kinds are then unknown, so each layer is treated as an average one, and full
    recomputation includes the head."""

    @property
    def group_layout(self) -> Layout:
        """Return the layout inside each replica group, which is `layout` if there is only one."""
        if self.replica_groups == 1:
            return self.layout
        inside = self.layout.dp_replicate // self.replica_groups if self.replica_groups else 1
        return changed(self.layout, dp_replicate=max(1, inside))

    @property
    def tokens(self) -> float:
        """Return the number of tokens in a rank's micro-batch, after context parallelism."""
        return self.micro_batch_size * self.seq_len / self.layout.cp


# Derive the software properties that determine time and memory from a framework's facts and a run's choices.


SUM_BYTES: dict[SumFormat, float] = {"compute": 2.0, "fp32": 4.0}


def describe_software(
    facts: FrameworkSpec, sharding: Sharding, compiled: bool, accumulate: SumFormat, reduce: SumFormat
) -> Software:
    """Return the framework's properties for a run with this sharding and these gradient formats."""
    state: StateFacts = getattr(facts.states, sharding)
    sums_apart = facts.gradient_copy and accumulate == "fp32"
    copies = 0.0 if facts.steps_from_sums and sums_apart else state.step_copy_bytes
    return Software(
        counted=facts.counted,
        fused_attention=facts.fused_attention,
        attention_generation=facts.attention_generation,
        fused_kernels=compiled or facts.fused_kernels,
        fused_loss=(compiled and facts.compiles_loss) or facts.fused_loss,
        plain_loss=not facts.compiles_loss,
        cut_logit_bytes=facts.cut_logit_bytes,
        fused_accumulation=facts.fused_accumulation,
        overlap_dp=facts.overlap_dp,
        overlap_tp=facts.overlap_tp,
        split_sends=facts.split_sends,
        grouped_experts=facts.grouped_experts,
        overlap_experts=facts.overlap_experts,
        expandable_segments=facts.expandable_segments,
        graphs=facts.graphs,
        unshards_pipelines=facts.unshards_pipelines,
        shards_states=sharding != "replicated",
        grad_bytes=SUM_BYTES[accumulate] + SUM_BYTES["compute"] * sums_apart,
        reduce_bytes=SUM_BYTES[reduce],
        master_bytes=state.master_bytes,
        bucket_bytes=state.bucket_bytes,
        step_bytes=copies,
        step_temporary_bytes=state.step_temporary_bytes,
        model_groups=facts.model_groups,
        shifted_logits=facts.shifted_logits,
        weight_bytes=state.weight_bytes,
    )


# An optimizer's state, memory traffic and arithmetic per parameter, averaged over a model.


ALONE = Layout()
ADAMW_BYTES = 8.0
QUANTISED_BYTES = 2 + 8 / BLOCK
"""Bytes per parameter for the codes of two moments, with two scales per block."""
UPDATE_BYTES: dict[OptimizerName, float] = {"adamw8bit": 260.0, "muon": 104.0}
"""Memory traffic of an update per value: the reads and writes of all operations in `engine/optim/adamw8bit.py` and, for
matrices, in `engine/optim/muon.py` without Newton-Schulz, counted by operation (tests/engine/optim). The single kernel
of other optimizers reads and writes gradients, weights and moments once."""
STEPS = 5
WIRE_BYTES = 2.0
"""Bytes per value when a matrix is sent to the rank that orthogonalises it, and back."""


@lru_cache(maxsize=256)
def moment_bytes(model: ModelSpec, optimizer: KeptState, lora: LoraSpec) -> float:
    """Return the mean number of bytes of optimizer state per trained parameter."""
    if isinstance(optimizer, float):
        return optimizer
    if optimizer in ("adamw", "sgd"):
        return ADAMW_BYTES if optimizer == "adamw" else 0.0
    if not has_layer_list(model):
        return QUANTISED_BYTES if optimizer == "adamw8bit" else ADAMW_BYTES
    blocks = [block_unit(model, layer, ALONE, lora) for layer in model.layer_list]
    outside = [] if lora.rank else [outside_unit(model, ALONE, first=True, last=True)]
    total = sum(state_bytes(optimizer, unit, in_block=True) for unit in blocks)
    total += sum(state_bytes(optimizer, unit, in_block=False) for unit in outside)
    return total / sum(unit.trained.full for unit in (*blocks, *outside))


@lru_cache(maxsize=256)
def matrix_share(model: TextModel) -> float:
    """Return the fraction of a model's parameters that muon orthogonalises."""
    blocks = [block_unit(model, layer, ALONE, LoraSpec()) for layer in model.layer_list]
    hidden = sum(rows * row for unit in blocks for rows, row in unit.matrices if is_hidden((rows, row)))
    return hidden / (sum(unit.full for unit in blocks) + outside_unit(model, ALONE, first=True, last=True).full)


@lru_cache(maxsize=256)
def newton_schulz_flops(model: TextModel) -> tuple[float, float]:
    """Return the FLOPs of orthogonalising each matrix once: (matrices of all layers without experts, all experts).

    For A rows of B values, with A <= B, an iteration computes X X^T and its matmul with X (2 A^2 B each), and the
    square of X X^T (2 A^3): muon (arXiv:2502.16982, section 2.1).
    """
    dense = experts = 0.0
    for layer in model.layer_list:
        stacks = expert_stacks(model.as_decoder, "experts" in layer.mixers).values()
        own = block_matrices(model, layer, ALONE)
        dense += sum(_flops(rows, row) for rows, row in own if is_hidden((rows, row)))
        experts += sum(number * _flops(rows, row) for number, rows, row in stacks)
    return dense, experts


def _flops(rows: float, row: float) -> float:
    small = min(rows, row)
    large = max(rows, row)
    return STEPS * (4.0 * small**2 * large + 2.0 * small**3)
