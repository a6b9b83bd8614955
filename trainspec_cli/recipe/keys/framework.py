"""A training framework as modelled by the planner: what its step fuses, copies, keeps, overlaps and shards.

Every fact is a documented property of the framework; none is fitted to runs. The defaults describe trainspec's own
engine, so a file states only the differences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from trainspec_cli.core.printable import GIB
from trainspec_cli.recipe.field_types import NonNegativeFloat, PositiveFloat, PositiveInt
from trainspec_cli.recipe.keys.layout import PipelineSchedule, ZeroStage

SumFormat = Literal["compute", "fp32"]


@dataclass(frozen=True)
class TableSpec:
    """A published table of runs whose rows do not name the framework."""

    source: str
    """The exact text in the `source` column of its rows."""
    year: PositiveInt | None = None
    """The year of its runs, for rows that do not state it; null: unknown (the newest version is assumed)."""


@dataclass(frozen=True)
class StateFacts:
    """Bytes of state per parameter, and the additional memory needed by an optimizer step."""

    weight_bytes: NonNegativeFloat = 2.0
    """Bytes per parameter kept between steps: 2 in the compute format, or 4 if the fp32 copy is the only one."""
    master_bytes: NonNegativeFloat = 4.0
    """Bytes per parameter of the copy that the optimizer updates; 0 if it updates the weights themselves."""
    step_copy_bytes: NonNegativeFloat = 0.0
    """Bytes of flat copies for each parameter that a rank updates. They are too large to fit into memory freed by
    activations."""
    step_temporary_bytes: NonNegativeFloat = 0.0
    """Bytes of temporary tensors for each parameter that a rank updates, if the optimizer works on lists of tensors.
    They fit into memory freed by activations."""
    bucket_bytes: NonNegativeFloat = 0.3 * GIB
    """Total size of the gradient and parameter buckets in flight."""


@dataclass(frozen=True)
class ShardingFacts:
    """The state of a parameter, depending on what data parallelism shards."""

    replicated: StateFacts = field(default_factory=StateFacts)
    """Nothing is sharded: every rank holds and updates all parameters (DDP)."""
    zero1: StateFacts = field(default_factory=StateFacts)
    """The optimizer state is sharded (ZeRO-1, a distributed optimizer)."""
    zero3: StateFacts = field(default_factory=lambda: StateFacts(weight_bytes=4.0, master_bytes=0.0))
    """Parameters are sharded as well, and gathered for computation (ZeRO-3, FSDP)."""


@dataclass(frozen=True)
class FrameworkSpec:
    name: str
    """The framework's name in plans."""
    version: str = ""
    """The version, or range of versions, that the facts describe; empty: all versions in use."""
    until_year: PositiveInt | None = None
    """The last year of runs to which these facts apply; null: they still apply. If several files describe a framework,
    a table row uses the one with the earliest such date that is not before the row's own date."""
    until_month: PositiveInt = 12
    """The last month of `until_year`. Rows that name a release by year and month (`25.11`) have its date; others have
    only a year, which is taken as its beginning."""
    names: tuple[str, ...] = ()
    """Names of the framework in tables of runs. They match whole words, ignoring case."""
    tables: tuple[TableSpec, ...] = ()
    """Published tables that are attributed to this framework regardless of what their rows state."""
    counted: bool = False
    """True if this is trainspec's own engine, whose eager steps are counted tensor by tensor; others are estimated."""
    schedules: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
    """The pipeline schedules that it supports; if empty, it has no pipeline parallelism."""
    zero_stages: tuple[ZeroStage, ...] = get_args(ZeroStage)
    """The ZeRO stages that it supports."""
    fused_attention: bool = True
    """Attention is one kernel (FlashAttention or similar); false: the score matrix is written and kept."""
    attention_generation: Literal[1, 2, 3, 9] = 2
    """The tensor-core generation for which the attention kernels were written: FlashAttention 1 to 3, or 9 for a vendor
    library that is updated for each chip (cuDNN, XLA, ROCm)."""
    fused_kernels: bool = False
    """Norms, activations and rotary embeddings are single kernels without torch.compile (Transformer Engine, Apex,
    XLA). A run that compiles its blocks always has them."""
    fused_loss: bool = False
    """Softmax and loss over the vocabulary are a single kernel in each direction, even without torch.compile."""
    compiles: bool = False
    """Blocks are compiled unless a run says otherwise, so a table that leaves `compile` empty means compiled blocks."""
    compiles_loss: bool = True
    """A run that compiles its blocks also compiles the loss."""
    cut_logit_bytes: NonNegativeFloat | None = None
    """Bytes per logit in an unfused loss over a vocabulary that is sharded by tensor parallelism; null: the same as for
    an unsharded vocabulary."""
    fused_accumulation: bool = False
    """Matrix multiplications add weight gradients directly to the accumulated gradients."""
    overlap_dp: bool = True
    """Gradient reduction and parameter gathering overlap with computation."""
    overlap_tp: bool = True
    """Tensor-parallel exchanges run in chunks that overlap with the matrix multiplications that need them."""
    split_sends: bool = True
    """Between pipeline stages, each tensor-parallel rank sends only its part of a tensor, and the receivers gather the
    parts (arXiv:2104.04473)."""
    grouped_experts: bool = True
    """Experts run as one grouped kernel, and a token is sent to each node only once, regardless of how many experts it
    visits there."""
    overlap_experts: bool = False
    """Tokens travel to experts and back while another micro-batch is computed in the other direction (1F1B overlap of
    the all-to-all)."""
    block_recompute: bool = False
    """Full recomputation is set to as few layers as are needed (`recompute_method: block`), so a table that states
    `full` leaves their number open."""
    packed_tokens: PositiveInt | None = None
    """Length of the samples that fine-tuning recipes pack into a sequence, whose attention does not cross samples;
    null: samples fill their sequence."""
    expandable_segments: bool = False
    """Its launcher sets `expandable_segments:True` for PyTorch's allocator, which reduces fragmentation. This is
    assumed to be available only on NVIDIA devices."""
    graphs: bool = False
    """Kernel launches are replayed (CUDA graphs) or few (compiled programs)."""
    accumulate: SumFormat = "fp32"
    """The format in which a rank sums gradients if the recipe does not specify it (`precision.reduce`)."""
    accumulate_fp16: SumFormat = "fp32"
    """The format in which a rank sums gradients in a run that computes in fp16."""
    reduce: SumFormat = "fp32"
    """The wire format of gradients if the recipe does not specify it (`precision.reduce`)."""
    gradient_copy: bool = False
    """Gradients in the compute format are kept in addition to their fp32 sums."""
    steps_from_sums: bool = True
    """The optimizer steps directly from fp32 gradient sums, without the copies in `step_copy_bytes`."""
    unshards_pipelines: bool = False
    """With pipeline stages, ZeRO-3 keeps gathered parameters and accumulates full gradients until the last micro-batch,
    because an exchange per micro-batch would cost more than the memory is worth."""
    model_groups: bool = False
    """The framework has communicators in addition to those of the axes: over all ranks of several axes, and between the
    ends of a pipeline."""
    shifted_logits: bool = False
    """The loss reads a copy of the logits that is shifted by one token."""
    allocator_peaks: bool = False
    """The peaks that it prints are those of PyTorch's allocator, which count neither the device's context nor NCCL."""
    gb_bytes: PositiveFloat = GIB
    """Number of bytes in one GB as printed by the framework: most tools use 2**30, as drivers do."""
    states: ShardingFacts = field(default_factory=ShardingFacts)
    """Bytes of state per parameter, depending on what data parallelism shards."""
    sources: dict[str, str] | None = None
    """The source of each fact by key; `default` applies to all other keys."""
