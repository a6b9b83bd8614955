"""A training framework as the planner knows it: what its step fuses, copies, keeps, overlaps and shards.

Every fact is one of the framework, with its source; none is fitted to runs. The defaults are trainspec's own engine, so
that a file says what is otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from trainspec_cli.recipe.keys.layout import PipelineSchedule, ZeroStage

SumFormat = Literal["compute", "fp32"]


@dataclass(frozen=True)
class TableSpec:
    """A published table of runs whose rows do not say the framework themselves."""

    source: str
    """What the column `source` of its rows says, whole."""
    year: PositiveInt | None = None
    """The year of its runs, for rows that do not say it; null: not known, which is as the newest version."""


@dataclass(frozen=True)
class StateFacts:
    """Bytes of a parameter's state, and what stepping the optimizer takes besides."""

    weight_bytes: NonNegativeFloat = 2.0
    """Of a parameter as kept between steps: 2 in the compute format, 4 where an fp32 copy is all there is."""
    master_bytes: NonNegativeFloat = 4.0
    """Of the copy that the optimizer updates; 0 where the weights themselves are."""
    step_copy_bytes: NonNegativeFloat = 0.0
    """Flat copies, a parameter of those that a rank steps: too large to lie where activations were."""
    step_temporary_bytes: NonNegativeFloat = 0.0
    """Temporaries of an optimizer over lists of tensors, a parameter of those that a rank steps: they lie where
    activations were."""
    bucket_bytes: NonNegativeFloat = 0.3 * GIB
    """Buckets of gradients and parameters in flight, all together."""


@dataclass(frozen=True)
class ShardingFacts:
    """The state of a parameter by what data parallelism shards."""

    replicated: StateFacts = field(default_factory=StateFacts)
    """Nothing is sharded: every rank holds and steps the whole (DDP)."""
    zero1: StateFacts = field(default_factory=StateFacts)
    """The optimizer's state is sharded (ZeRO-1, a distributed optimizer)."""
    zero3: StateFacts = field(default_factory=lambda: StateFacts(weight_bytes=4.0, master_bytes=0.0))
    """Parameters are sharded too, and gathered to compute with (ZeRO-3, FSDP)."""


@dataclass(frozen=True)
class FrameworkSpec:
    name: str
    """The framework's name, as plans show it."""
    version: str = ""
    """The version, or range of versions, that the facts are of; empty: all that are in use."""
    until_year: PositiveInt | None = None
    """The last year of the runs that had these facts; null: they hold today. A row of a table takes, of the files with
    its framework's name, the one with the earliest such year that is not before its own."""
    names: tuple[str, ...] = ()
    """Names by which tables of runs say the framework; they are found as whole words, in upper or lower case."""
    tables: tuple[TableSpec, ...] = ()
    """Published tables that are of this framework whatever their rows say."""
    counted: bool = False
    """This is trainspec's own engine, whose eager steps are counted tensor by tensor; others are estimated."""
    schedules: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
    """The schedules of pipelines that it has; none: it has no pipelines."""
    zero_stages: tuple[ZeroStage, ...] = get_args(ZeroStage)
    """The stages of ZeRO that it has."""
    fused_attention: bool = True
    """Attention in one kernel (FlashAttention or alike); false: the score matrix is written and kept."""
    attention_generation: Literal[1, 2, 3, 9] = 2
    """The generation of tensor cores that the attention kernels were written for: FlashAttention 1 to 3, and 9 where a
    maker's library keeps up with its chips (cuDNN, XLA, ROCm)."""
    fused_kernels: bool = False
    """Norms, activations and rotary embeddings are single kernels without torch.compile (Transformer Engine, Apex,
    XLA). A run that compiles its blocks has them in any case."""
    fused_loss: bool = False
    """Softmax and loss over the vocabulary are one kernel each way, without torch.compile."""
    compiles_loss: bool = True
    """A run that compiles its blocks compiles the loss too."""
    cut_logit_bytes: NonNegativeFloat | None = None
    """Bytes of a logit in a loss of plain operations over a vocabulary that tensor parallelism cuts; null: as many as
    over a whole vocabulary."""
    fused_accumulation: bool = False
    """Matrix products add weight gradients to their sums themselves."""
    overlap_dp: bool = True
    """Gradients are reduced, and parameters gathered, while others are computed."""
    overlap_tp: bool = True
    """Tensor-parallel exchanges run in chunks beside the matrix products that need them."""
    split_sends: bool = True
    """Pipeline stages send each tensor-parallel rank's part alone and gather it at the other end (arXiv:2104.04473)."""
    grouped_experts: bool = True
    """Experts run as one grouped kernel, and a token crosses the network once a node, whatever its experts there."""
    expandable_segments: bool = False
    """Its launcher sets `expandable_segments:True` for PyTorch's allocator, which then loses less memory to holes; only
    NVIDIA's devices are taken to allow it."""
    graphs: bool = False
    """Launches are replayed (CUDA graphs) or few (compiled programs)."""
    accumulate: SumFormat = "fp32"
    """The format in which a rank sums gradients where nothing is said of it; a recipe says it (`precision.reduce`)."""
    accumulate_fp16: SumFormat = "fp32"
    """The same where the run computes in fp16."""
    reduce: SumFormat = "fp32"
    """The format of gradients on the wire where nothing is said of it; a recipe says it (`precision.reduce`)."""
    gradient_copy: bool = False
    """Gradients in the compute format stay beside their sums in fp32."""
    steps_from_sums: bool = True
    """Gradients summed in fp32 are stepped from as they lie, without the copies of `step_copy_bytes`."""
    unshards_pipelines: bool = False
    """With pipeline stages, ZeRO-3 keeps gathered parameters and sums whole gradients until the last micro-batch: an
    exchange for each micro-batch would cost more than the memory."""
    model_groups: bool = False
    """Communicators besides the axes': of all ranks of several axes, and of a pipeline's ends."""
    shifted_logits: bool = False
    """A copy of the logits, shifted by a token, goes into the loss."""
    gb_bytes: PositiveFloat = GIB
    """What it means where it prints GB: most tools count in 2**30, as drivers do."""
    states: ShardingFacts = field(default_factory=ShardingFacts)
    """Bytes of a parameter's state, by what data parallelism shards."""
    sources: dict[str, str] | None = None
    """The source of each fact by key; `default` for the rest."""
