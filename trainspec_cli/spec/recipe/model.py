"""The model. One frozen dataclass per family; `family` selects it in YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu", "relu2"]
"""relu2 is the square of relu (Nemotron)."""


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
class RopeScaling:
    """Rotary frequencies stretched from `original_seq_len` tokens to `factor` times as many."""

    kind: Literal["llama3", "yarn"]
    """llama3 (arXiv:2407.21783): long waves slowed down, short ones kept. yarn (arXiv:2309.00071): by turns within
    the original length, and softer scores."""
    factor: float
    original_seq_len: int
    low_freq_factor: float = 1.0
    """llama3: waves longer than original_seq_len / this are slowed by the whole factor."""
    high_freq_factor: float = 4.0
    """llama3: waves shorter than original_seq_len / this are kept."""
    beta_fast: float = 32.0
    """yarn: what turns more often than this is kept."""
    beta_slow: float = 1.0
    """yarn: what turns less often than this is slowed by the whole factor."""
    whole_bounds: bool = True
    """yarn: the bounds between the two are rounded to whole frequencies (gpt_oss does not)."""


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts instead of the feed-forward."""

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
    shared_gate: bool = False
    """The shared experts' output is scaled by a learned sigmoid of each token (Qwen2-MoE)."""
    bias: bool = False
    """Biases of the router and of the routed experts' matrices (gpt_oss)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function from the router's logits to scores; sigmoid scores every expert by itself (DeepSeek-V3)."""
    normalise_weights: bool = True
    """The chosen experts' weights sum to one."""
    weight_scale: float = 1.0
    """A factor on the weights after that (the routed scaling factor)."""
    num_groups: int = 1
    """Experts are divided into groups; a token's experts come from the `top_groups` groups whose two best score
    highest."""
    top_groups: int = 1
    balance_rate: float = 0.0
    """Balancing without a loss (arXiv:2408.15664): after each step the choice of an expert that was visited less than
    the mean is made likelier by so much, of the others less likely; 0: none."""
    balance_loss: float = 0.0
    """Coefficient of the loss that balances each sequence (DeepSeek-V3, eq. 17-20), weighed by the sequence's tokens;
    it steers the gradients and is no part of the loss that is shown."""
    capacity_factor: float | None = None
    """An expert takes at most this many times its even share of each sequence, the highest weights first; what is over
    is dropped. null: it takes all (dropless)."""


@dataclass(frozen=True)
class DecoderModel:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU.

    The fields below `norm_eps` describe deviations from that.
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
    """Extra layers that predict further tokens (multi-token prediction, DeepSeek-V3). The planner counts them; the
    engine does not build them."""
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    gate_limit: float | None = None
    """Gate and linear half of the experts are clamped to it, the gate weighed by sigmoid(1.702 x), 1 added to the
    linear half (gpt_oss)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the query, key and value projections (Qwen2), or of the output's too (gpt_oss)."""
    qk_norm: bool = False
    """A norm over each query's and each key's head before the rotation (Qwen3)."""
    attention_sinks: bool = False
    """A learned logit a head that takes part in the softmax and carries no value (gpt_oss)."""
    rope_scaling: RopeScaling | None = None

    def is_expert_layer(self, layer: int) -> bool:
        experts = self.experts
        if experts is None or layer < experts.first_dense_layers:
            return False
        return (layer - experts.first_dense_layers) % experts.every == experts.every - 1

    def window_of(self, layer: int) -> int | None:
        """Tokens that this layer attends to; None: all before it."""
        every = self.global_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window


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
    norm_eps: float = 1e-5
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    layer_pattern: str = ""
    """One letter a layer: M Mamba, * attention, - feed-forward, E experts. Empty: each kind spread evenly."""

    @property
    def num_layers(self) -> int:
        return self.mamba_layers + self.attention_layers + self.mlp_layers + self.expert_layers

    @property
    def layer_counts(self) -> dict[str, int]:
        """Letter of the pattern -> layers of that kind."""
        return {
            "M": self.mamba_layers,
            "*": self.attention_layers,
            "-": self.mlp_layers,
            "E": self.expert_layers,
        }

    @property
    def layers(self) -> str:
        """The pattern, or an even spread of the kinds if it is empty."""
        places = [(i + 0.5) / count for count in self.layer_counts.values() for i in range(count)]
        letters = [letter for letter, count in self.layer_counts.items() for _ in range(count)]
        even = "".join(letter for _, letter in sorted(zip(places, letters, strict=True), key=lambda pair: pair[0]))
        return self.layer_pattern or even

    @property
    def mamba_heads(self) -> int:
        return self.mamba_num_heads or self.mamba_expand * self.hidden_size // self.mamba_head_dim

    @property
    def as_decoder(self) -> DecoderModel:
        """The attention, feed-forward and expert layers in a decoder's terms; they have no positions."""
        return DecoderModel(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=max(self.num_heads, 1),
            num_kv_heads=max(self.num_kv_heads, 1),
            head_dim=self.head_dim,
            ffn_size=self.ffn_size,
            vocab_size=self.vocab_size,
            tied_embeddings=self.tied_embeddings,
            norm_eps=self.norm_eps,
            gated_mlp=self.gated_mlp,
            activation=self.activation,
            experts=self.experts,
        )


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
    """Classes of a sample, or for a U-Net of each voxel; class 0 of voxels is the background."""
    groups: int = 1
    """Groups of the 3x3 convolutions: 32 in ResNeXt-50 32x4d."""
    family: Literal["conv"] = "conv"
    name: str = ""

    @property
    def segments(self) -> bool:
        """True if every voxel has a class, False if the sample as a whole has one."""
        return self.architecture == "unet"

    @property
    def expansion(self) -> int:
        """Channels of a bottleneck's output over those inside; ResNeXt's are twice as wide inside."""
        return 4 if self.groups == 1 else 2


ModelSpec = DecoderModel | HybridModel | ConvModel
