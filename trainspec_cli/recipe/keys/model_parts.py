"""Parts of which models are put together, and the sizes that layers have of their own: facts that the engine builds
by and the planner counts by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

from trainspec_cli.recipe.field_types import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Range

SINK_DIMS = 8
"""Dims by which heads grow where a sink's logit travels with the queries: kernels want multiples of 8."""
CONV_TAPS = 4
"""Tokens that a state-space layer's convolution sees."""
SCAN_BLOCK = 128
"""Tokens of a block of a scan: the products within grow with it, the states between shrink."""
STEM_CHANNELS = 64
"""Channels of a ResNet's first convolution."""
LOSS_CHUNK_BYTES = 128 * 2**20
"""Logits that the loss holds at once, as fp32."""


def loss_chunk_tokens(vocab_rows: int, chunk_bytes: int = LOSS_CHUNK_BYTES) -> int:
    """Tokens whose logits the loss makes at once: as many as the bytes allow, at least 64."""
    return max(64, chunk_bytes // (4 * vocab_rows))


Mixer = Literal["attention", "latent", "feed_forward", "experts", "mamba"]
"""Parts that can stand behind a norm of a layer of a model of text."""
Activation = Literal["silu", "gelu", "relu2"]
"""relu2 is the square of relu (Nemotron)."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values pass through a low-rank latent."""

    kv_lora_rank: PositiveInt
    """Width of the latent that keys and values pass through."""
    q_lora_rank: NonNegativeInt = 0
    """0: the queries are projected directly."""
    qk_nope_head_dim: PositiveInt = 128
    """Width of the part of a query's or key's head that is not rotated."""
    qk_rope_head_dim: PositiveInt = 64
    """Width of the part that is rotated."""
    v_head_dim: PositiveInt = 128
    """Width of a value's head."""


@dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies stretched from `original_seq_len` tokens to `factor` times as many."""

    kind: Literal["llama3", "yarn"]
    """llama3 (arXiv:2407.21783): long waves slowed down, short ones kept. yarn (arXiv:2309.00071): by turns within
    the original length, and softer scores."""
    factor: Annotated[float, Range(1)]
    """Sequences are so many times longer than the model was trained on first."""
    original_seq_len: PositiveInt
    """Tokens of a sequence that the model was trained on first."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: waves longer than original_seq_len / this are slowed by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: waves shorter than original_seq_len / this are kept."""
    beta_fast: PositiveFloat = 32.0
    """yarn: what turns more often than this is kept."""
    beta_slow: PositiveFloat = 1.0
    """yarn: what turns less often than this is slowed by the whole factor."""
    whole_bounds: bool = True
    """yarn: the bounds between the two are rounded to whole frequencies (gpt_oss does not)."""


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts instead of the feed-forward."""

    num_experts: PositiveInt
    """Experts of a layer, of which a token visits some."""
    top_k: PositiveInt
    """Experts that a token visits."""
    expert_ffn_size: PositiveInt
    """Width of an expert."""
    shared_experts: NonNegativeInt = 0
    """Experts that every token visits, each of `shared_expert_ffn_size`."""
    shared_expert_ffn_size: PositiveInt | None = None
    """null: as wide as a routed expert."""
    first_dense_layers: NonNegativeInt = 0
    """This many leading layers keep the plain feed-forward of `ffn_size`."""
    every: PositiveInt = 1
    """2 makes every second layer an expert layer, the others plain."""
    shared_gate: bool = False
    """The shared experts' output is scaled by a learned sigmoid of each token (Qwen2-MoE)."""
    bias: bool = False
    """Biases of the router and of the routed experts' matrices (gpt_oss)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function from the router's logits to scores; sigmoid scores every expert by itself (DeepSeek-V3)."""
    normalise_weights: bool = True
    """The chosen experts' weights sum to one."""
    weight_scale: PositiveFloat = 1.0
    """A factor on the weights after that (the routed scaling factor)."""
    num_groups: PositiveInt = 1
    """Experts are divided into groups; a token's experts come from the `top_groups` groups whose two best score
    highest."""
    top_groups: PositiveInt = 1
    """Groups of experts that a token may choose from."""
    balance_rate: NonNegativeFloat = 0.0
    """Balancing without a loss (arXiv:2408.15664): after each step the choice of an expert that was visited less than
    the mean is made likelier by so much, of the others less likely; 0: none."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that balances each sequence (DeepSeek-V3, eq. 17-20), weighed by the sequence's tokens;
    it steers the gradients and is no part of the loss that is shown."""
    capacity_factor: PositiveFloat | None = None
    """An expert takes at most this many times its even share of each sequence, the highest weights first; what is over
    is dropped. null: it takes all (dropless)."""


class Layer(NamedTuple):
    """A kind of layer of a model of text: what stands behind its norms, one after another."""

    mixers: tuple[Mixer, ...]
    window: int | None = None
    """Tokens that its attention sees; None: all before."""
