"""One run as the estimators see it: nothing open, nothing prose."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from trainspec_cli.core.units import GIB
from trainspec_cli.plan.hardware.topology import Fabric
from trainspec_cli.recipe.keys.comm import WireFormats
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.lora import LoraSpec
from trainspec_cli.recipe.keys.model import ModelSpec
from trainspec_cli.recipe.keys.optim import KeptState

RecordT = TypeVar("RecordT", Layout, "Setup")


def changed(record: RecordT, **values: object) -> RecordT:
    """Return the record with other values, as `dataclasses.replace` does in four times the time: a search makes tens of
    thousands. Neither kind of record checks or keeps anything besides its fields."""
    made = object.__new__(type(record))
    vars(made).update(vars(record), **values)
    return made


@dataclass(frozen=True)
class Recompute:
    """Parts of the forward that the backward does again, and which layers do so."""

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    layers: float = 1.0
    """Part of the layers it applies to."""

    @property
    def full(self) -> bool:
        return self.matmul >= 1.0


RECOMPUTE = {
    "none": Recompute(),
    "selective": Recompute(attention=1.0),
    "selective_op": Recompute(matmul=0.5, elementwise=1.0),
    "full": Recompute(1.0, 1.0, 1.0),
}
"""selective: the attention core (arXiv:2205.05198). selective_op: every second matmul's output is kept."""


@dataclass(frozen=True)
class Software:
    """The training framework's properties that change time and memory."""

    counted: bool = True
    """trainspec's own engine, whose eager steps are counted tensor by tensor."""
    fused_attention: bool = True
    """FlashAttention or alike; False materialises the score matrix."""
    attention_generation: int = 9
    """Generation of the tensor cores that the attention kernels were written for: FlashAttention 1 to 3, and 9 where a
    maker's library keeps up with its chips (cuDNN, XLA, ROCm)."""
    fused_kernels: bool = True
    """Norms, activations, losses as single kernels (Transformer Engine, torch.compile, XLA)."""
    fused_loss: bool = False
    """Softmax and loss over the vocabulary as one kernel each way."""
    plain_loss: bool = False
    """The loss stays in plain operations where the blocks are compiled."""
    cut_logit_bytes: float | None = None
    """Bytes of a logit in a loss of plain operations over a vocabulary that is cut; None: as over a whole one."""
    fused_accumulation: bool = True
    """Weight gradients are added up by the matrix products that make them."""
    overlap_dp: bool = True
    """Gradients are reduced, and parameters gathered, while others are computed."""
    overlap_tp: bool = True
    split_sends: bool = True
    """Pipeline stages send each tensor-parallel rank's part alone and gather it at the other end (arXiv:2104.04473)."""
    grouped_experts: bool = True
    """Experts run as one grouped kernel, and their tokens cross the network once a node."""
    expandable_segments: bool = False
    """The framework's launcher makes PyTorch's allocator grow its segments, where the devices allow it."""
    graphs: bool = False
    """Launches are replayed (CUDA graphs) or few (compiled programs)."""
    grad_bytes: float = 4.0
    """Bytes of a gradient while it is accumulated."""
    shards_states: bool = True
    """What `zero_stage` says is sharded, over ranks of dp_shard and cp; False: each replica has all (DDP)."""
    unshards_pipelines: bool = False
    """With stages, ZeRO-3 keeps gathered parameters, and sums gradients unsharded, until the last micro-batch (FSDP2
    under torch's schedules: an exchange a micro-batch would cost more than the memory)."""
    reduce_bytes: float = 4.0
    """Bytes of a gradient on the wire, in full."""
    wire: WireFormats = field(default_factory=WireFormats)
    """The formats in which gradients and parameters travel."""
    master_bytes: float = 4.0
    """Bytes of the parameter that the optimizer updates, when weights are kept in the compute format beside it."""
    optimizer: KeptState = "adamw"
    moment_bytes: float = 8.0
    """Bytes of the optimizer's moments, a parameter."""
    bucket_bytes: float = 0.3 * GIB
    """Flat gradient and parameter buckets in flight."""
    step_bytes: float = 0.0
    """A parameter, flat copies that the optimizer steps from: too large to lie where activations were."""
    step_temporary_bytes: float = 0.0
    """A parameter, temporaries of optimizers over lists of tensors: these lie where activations were."""
    model_groups: bool = False
    """Communicators besides the axes': of all ranks, and of a pipeline's ends (Megatron and its descendants)."""
    shifted_logits: bool = False
    """A copy of the logits, shifted by a token, goes into the loss."""
    weight_bytes: float = 2.0
    """Bytes of a parameter as kept between steps; 4 where a sharded fp32 copy is all there is (FSDP)."""


@dataclass(frozen=True)
class Setup:
    """A model, how it is spread, and on what."""

    model: ModelSpec
    layout: Layout
    fabric: Fabric
    seq_len: int
    micro_batch_size: float
    grad_accum: int
    """Micro-batches a step."""
    compute: str = "bf16"
    matmul: str = "bf16"
    """Format of the linear layers: bf16, fp8, mxfp8, nvfp4, ..."""
    recompute: Recompute = field(default_factory=Recompute)
    software: Software = field(default_factory=Software)
    trainable: float = 1.0
    """Part of the parameters that have gradients: below 1 for adapters (LoRA), whose base needs no weight gradients."""
    sharded: float = 1.0
    """Part of the parameters that sharding spreads and gathers: below 1 where adapters' base is quantised."""
    lora: LoraSpec = field(default_factory=LoraSpec)
    offload_optimizer: bool = False
    replica_groups: int = 1
    """Replica groups among the replicas of `layout`, which exchange gradients once a step; 0: each replica is one."""
    outer_bytes: float = 0.0
    """Bytes that an outer optimizer keeps for each trained parameter."""
    offload_layers: float = 0.0
    """Part of the layers whose activations wait in host memory."""

    tabled: bool = False
    """A row of a table of measured runs, timed as when the efficiencies were fitted to them: where layers of each kind
    stand is unknown, so that each counts as their average, and full recomputation counts the head among its layers."""

    @property
    def group_layout(self) -> Layout:
        """The layout inside each replica group; `layout` where there is one."""
        if self.replica_groups == 1:
            return self.layout
        inside = self.layout.dp_replicate // self.replica_groups if self.replica_groups else 1
        return changed(self.layout, dp_replicate=max(1, inside))

    @property
    def tokens(self) -> float:
        """Tokens of a rank's micro-batch, after context parallelism."""
        return self.micro_batch_size * self.seq_len / self.layout.cp
