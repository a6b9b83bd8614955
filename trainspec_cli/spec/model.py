"""What is trained. One frozen dataclass per family; `family` tells them apart in YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values pass through a low-rank latent."""

    kv_lora_rank: int
    q_lora_rank: int = 0
    """0: the queries are projected directly."""
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128


@dataclass(frozen=True)
class ExpertSpec:
    """Mixture of experts in the place of the feed-forward."""

    num_experts: int
    top_k: int
    expert_ffn_size: int
    shared_experts: int = 0
    """Experts that every token visits, each of `shared_expert_ffn_size`."""
    shared_expert_ffn_size: int | None = None
    """null: as wide as a routed expert."""
    first_dense_layers: int = 0
    """This many leading layers keep the plain feed-forward of `ffn_size`."""
    every: int = 1
    """2 makes every second layer an expert layer, the others plain."""


@dataclass(frozen=True)
class DecoderModel:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU.

    The fields below `norm_eps` say how a model departs from that.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the feed-forward (a gated one, SwiGLU, has three matrices of hidden_size x ffn_size)."""
    vocab_size: int
    family: Literal["decoder"] = "decoder"
    name: str = ""
    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    gated_mlp: bool = True
    """False: two matrices (GPT, MPT, Nemotron) instead of three."""
    learned_positions: int = 0
    """Rows of a learned position table; 0 for rotary or ALiBi."""
    sliding_window: int | None = None
    """Tokens that a windowed layer attends to; null: all before it."""
    global_attention_every: int = 1
    """With a window: every n-th layer attends to everything; 0: none does."""
    mla: LatentAttention | None = None
    experts: ExpertSpec | None = None
    prediction_layers: int = 0
    """Extra layers that predict further tokens (multi-token prediction, DeepSeek-V3)."""


@dataclass(frozen=True)
class HybridModel:
    """State-space layers (Mamba-2, arXiv:2405.21060), alone or with attention, feed-forward and expert layers between.

    Every layer is one mixer behind a norm: the counts below are of single layers, as in Nemotron-H.
    """

    hidden_size: int
    vocab_size: int
    mamba_layers: int
    attention_layers: int = 0
    mlp_layers: int = 0
    expert_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 128
    ffn_size: int = 0
    gated_mlp: bool = False
    experts: ExpertSpec | None = None
    mamba_expand: int = 2
    """Inner width over hidden width."""
    mamba_head_dim: int = 64
    mamba_num_heads: int | None = None
    """null: mamba_expand x hidden_size / mamba_head_dim."""
    mamba_state_size: int = 128
    mamba_groups: int = 8
    family: Literal["hybrid"] = "hybrid"
    name: str = ""
    tied_embeddings: bool = False

    @property
    def num_layers(self) -> int:
        return self.mamba_layers + self.attention_layers + self.mlp_layers + self.expert_layers


@dataclass(frozen=True)
class ConvModel:
    """Convolutional network: a residual classifier or detector in 2-D, or a U-Net in 2-D or 3-D."""

    architecture: Literal["resnet", "retinanet", "maskrcnn", "unet"]
    """retinanet and maskrcnn are a resnet with a feature pyramid and detection heads on top; they can be planned."""
    input_size: tuple[int, ...]
    """Extent of one sample: (224, 224), or (128, 128, 128) for volumes."""
    widths: tuple[int, ...]
    """Channels of each stage (of a resnet: inside its bottlenecks; of a U-Net: from top to bottom)."""
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    """Blocks a stage (resnet)."""
    in_channels: int = 3
    num_classes: int = 1000
    """What a sample, or for a U-Net each voxel, is told to be; of voxels class 0 is the background."""
    groups: int = 1
    """Of the 3x3 convolutions: 32 in ResNeXt-50 32x4d."""
    family: Literal["conv"] = "conv"
    name: str = ""

    @property
    def segments(self) -> bool:
        """Whether every voxel has a class, or the sample as a whole."""
        return self.architecture == "unet"

    @property
    def expansion(self) -> int:
        """Channels of a bottleneck's output over those inside; ResNeXt's are twice as wide inside."""
        return 4 if self.groups == 1 else 2


ModelSpec = DecoderModel | HybridModel | ConvModel
