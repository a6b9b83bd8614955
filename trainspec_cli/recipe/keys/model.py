"""The models that a recipe can train: one frozen dataclass for each family, with the family's record.

In YAML, `family` distinguishes them. `unit` is the unit of batch sizes. docs/adding-a-model.md describes
how to add a family."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeGuard

from trainspec_cli.recipe.field_types import (
    MISSING,
    NonNegativeFloat,
    NonNegativeInt,
    Option,
    PositiveFloat,
    PositiveInt,
    Range,
)

# Model components and fixed layer sizes, which the engine uses to build models, and the planner to predict their cost.


SINK_DIMS = 8
"""Number of dimensions added to each head if sink logits are stored with the queries, because kernels need multiples of
8."""
CONV_TAPS = 4
"""Kernel size of a state-space layer's convolution, in tokens."""
SCAN_BLOCK = 128
"""Number of tokens per scan block. Larger blocks mean larger matrix multiplications within blocks, and fewer states
between them."""
STEM_CHANNELS = 64
"""Number of channels in a ResNet's first convolution."""
LOSS_CHUNK_BYTES = 128 * 2**20
"""Bytes of fp32 logits that the loss holds at a time."""


def loss_chunk_tokens(vocab_rows: int, chunk_bytes: int = LOSS_CHUNK_BYTES) -> int:
    """Return the number of tokens whose logits the loss computes at once: as many as fit in `chunk_bytes`, in multiples
    of 64, which fill the tiles of matrix multiplications."""
    return max(64, chunk_bytes // (4 * vocab_rows) // 64 * 64)


def loss_group_tokens(hidden_size: int, width: float, chunk_tokens: int) -> int:
    """Return the number of tokens, in whole chunks, whose logit gradients (`width` bytes per value) the loss multiplies
    at once: at least 2,048 in bf16, or more as long as the gradients take at most half the memory of the head's fp32
    gradient."""
    bytes_per_row = max(4096, 2 * hidden_size)
    return max(1, int(bytes_per_row / width) // chunk_tokens) * chunk_tokens


Mixer = Literal["attention", "latent", "feed_forward", "experts", "mamba"]
"""The modules that can follow a norm in a layer of a text model."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
"""gelu_tanh is GELU's approximation by tanh (GPT-2, Gemma); relu2 is the square of relu (Nemotron)."""
Rotation = Literal["none", "global", "local"]
"""How a layer rotates queries and keys: not at all, with the frequencies of `rope_theta`, or of `local_rope_theta`."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), in which keys and values pass through a low-rank
    latent."""

    kv_lora_rank: PositiveInt
    """Width of the latent that keys and values pass through."""
    q_lora_rank: NonNegativeInt = 0
    """Width of the latent that queries pass through; 0: queries are projected directly."""
    qk_nope_head_dim: PositiveInt = 128
    """Width of the part of a query or key head that is not rotated."""
    qk_rope_head_dim: PositiveInt = 64
    """Width of the part that is rotated."""
    v_head_dim: PositiveInt = 128
    """Width of a value's head."""
    norm_eps: PositiveFloat | None = None
    """`norm_eps` of the latents' norms; null: the same as in the model's other norms."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies from `original_seq_len` tokens to `factor` times as many."""

    kind: Literal["llama3", "yarn", "linear"]
    """linear (arXiv:2306.15595): all frequencies are divided by the factor. llama3 (arXiv:2407.21783): long wavelengths
    are stretched, short ones are kept. yarn (arXiv:2309.00071): frequencies are scaled depending on their number of
    rotations within the original length, and attention scores get a temperature."""
    factor: Annotated[float, Range(1)]
    """Ratio of the new sequence length to the original one."""
    original_seq_len: NonNegativeInt = 0
    """Sequence length of the model's original training, in tokens; required unless the kind is linear."""
    low_freq_factor: PositiveFloat = 1.0
    """llama3: wavelengths longer than original_seq_len divided by this value are stretched by the full factor."""
    high_freq_factor: PositiveFloat = 4.0
    """llama3: wavelengths shorter than original_seq_len divided by this value are kept."""
    beta_fast: PositiveFloat = 32.0
    """yarn: frequencies with more rotations than this are kept."""
    beta_slow: PositiveFloat = 1.0
    """yarn: frequencies with fewer rotations than this are reduced by the full factor."""
    whole_bounds: bool = True
    """yarn: round the indices of the first and last frequency between these two limits to integers (gpt_oss does
    not)."""
    mscale: NonNegativeFloat = 1.0
    """yarn: attention scores are multiplied by (0.1 mscale ln(factor) + 1)^2."""


@dataclass(frozen=True)
class ExpertSpec:
    """A mixture of experts that replaces the feed-forward."""

    num_experts: PositiveInt
    """Number of routed experts per layer."""
    top_k: PositiveInt
    """Number of routed experts per token."""
    expert_ffn_size: PositiveInt
    """Width of an expert."""
    shared_experts: NonNegativeInt = 0
    """Number of experts that every token visits, each `shared_expert_ffn_size` wide."""
    shared_expert_ffn_size: PositiveInt | None = None
    """Width of a shared expert; null: the same as a routed expert."""
    first_dense_layers: NonNegativeInt = 0
    """Number of leading layers that keep the dense feed-forward of `ffn_size`."""
    every: PositiveInt = 1
    """Every n-th layer is an expert layer; the others are dense."""
    shared_gate: bool = False
    """Scale the output of the shared experts by a learned sigmoid per token (Qwen2-MoE)."""
    bias: bool = False
    """True if the router and the routed experts' matrices have biases (gpt_oss)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """The function that maps the router's logits to scores; sigmoid scores each expert independently (DeepSeek-V3)."""
    normalise_weights: bool = True
    """Normalise the weights of the chosen experts so that they sum to one."""
    weight_scale: PositiveFloat = 1.0
    """Factor applied to the weights after normalisation (the routed scaling factor)."""
    num_groups: PositiveInt = 1
    """Number of expert groups. A token's experts come from the `top_groups` groups whose `group_best` best experts have
    the highest scores."""
    top_groups: PositiveInt = 1
    """Number of expert groups that a token may choose from."""
    group_best: PositiveInt = 2
    """Number of best experts whose scores are summed to a group's score (1 in DeepSeek-V2)."""
    choice_bias: bool = False
    """True if each expert has a bias that counts only in the choice of experts (DeepSeek-V3's e_score_correction_bias).
    Only `balance_rate` changes it, which also adds it."""
    balance_rate: NonNegativeFloat = 0.0
    """Loss-free balancing (arXiv:2408.15664): after each step, the bias of each expert that received fewer tokens than
    the mean is raised by this amount, and the biases of the others are lowered by it; 0: no balancing."""
    balance_loss: NonNegativeFloat = 0.0
    """Coefficient of the loss that balances each sequence (DeepSeek-V3, eq. 17-20), weighted by the sequence's tokens.
    It affects the gradients but is not part of the reported loss."""
    capacity_factor: PositiveFloat | None = None
    """An expert accepts at most this many times its even share of each sequence's tokens, those with the highest
    weights first, and drops the rest. null: it accepts all tokens (dropless)."""

    @property
    def has_choice_bias(self) -> bool:
        return self.choice_bias or self.balance_rate > 0

    @property
    def shared_width(self) -> int:
        """Return the total width of the shared experts."""
        return self.shared_experts * (self.shared_expert_ffn_size or self.expert_ffn_size)


class LayerNorms(NamedTuple):
    """Which norms a part of a layer has."""

    before: bool
    after: bool


class Layer(NamedTuple):
    """A kind of layer in a text model: the modules that follow its norms, in order."""

    mixers: tuple[Mixer, ...]
    window: int | None = None
    """Number of tokens that its attention sees; None: all previous tokens."""
    rotates: bool = True
    """Whether its attention rotates queries and keys, if the model does."""


@dataclass(frozen=True)
class FamilyRecord:
    """A model family: the modules that implement its work, memory and layers, and the features that it does not
    support. Modules are named, not imported: the planner imports its own, and only the engine, which imports torch,
    imports the engine's."""

    work: str
    """Planner module: parameters, FLOPs and the work of the layers (`planner.workload.FamilyWork`)."""
    builder: str
    """Engine module: `build(model, seq_len, layers)` builds the torch module."""
    memory: str = ""
    """Planner module: `replay(run, pipeline_rank)` counts a step's memory tensor by tensor. If empty, the planner
    estimates it as for other frameworks."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What the engine cannot do with such a model (a layout axis or one of `FEATURES`) -> the reason."""


FEATURES = ("ep", "lora", "nf4", "fp8", "compile", "elastic", "muon", "loss", "kernels")


@dataclass(frozen=True)
class DecoderModel:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU.

    The fields after `norm_eps` describe variations.
    """

    num_layers: PositiveInt
    """Number of layers, each with attention and a feed-forward."""
    hidden_size: PositiveInt
    """Width of the hidden state between layers."""
    num_heads: PositiveInt
    """Number of attention heads."""
    num_kv_heads: PositiveInt
    """Number of key and value heads (grouped-query attention); equal to `num_heads` in plain attention."""
    head_dim: PositiveInt
    """Width of a head."""
    ffn_size: PositiveInt
    """Width of the feed-forward. If gated, as in SwiGLU, it has three matrices of hidden_size x ffn_size."""
    vocab_size: PositiveInt
    """Vocabulary size, in tokens."""
    family: Literal["decoder"] = "decoder"
    """The name of the model family."""
    name: str = ""
    """The model's name in plans and reports."""
    tied_embeddings: bool = False
    """True if input embedding and output head share one matrix."""
    rope_theta: PositiveFloat = 10_000.0
    """The base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    gated_mlp: bool = True
    """True if the feed-forward is gated; false: two matrices (GPT, MPT, Nemotron) instead of three."""
    learned_positions: NonNegativeInt = 0
    """Number of learned position embeddings; 0 with rotary embeddings or ALiBi."""
    sliding_window: PositiveInt | None = None
    """Number of tokens that a windowed layer attends to; null: all previous tokens."""
    global_attention_every: NonNegativeInt = 1
    """With a window: every n-th layer attends to all tokens; 0: no layer does."""
    mla: LatentAttentionSpec | None = None
    """Latent attention instead of grouped-query attention; null: not used."""
    experts: ExpertSpec | None = None
    """A mixture of experts instead of the feed-forward; null: not used."""
    prediction_layers: NonNegativeInt = 0
    """Number of additional layers that predict further tokens (multi-token prediction, DeepSeek-V3, arXiv:2412.19437).
    Each reads the hidden states of the one before it and the embeddings of the tokens that were predicted last."""
    prediction_loss_weight: NonNegativeFloat = 0.3
    """Weight of the prediction layers' mean loss. It affects the gradients but is not part of the reported loss."""
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    gate_limit: PositiveFloat | None = None
    """Limit for clamping the gate and the linear half of the experts. The gate is then weighted by sigmoid(1.702 x),
    and 1 is added to the linear half (gpt_oss). null: no limit."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Which projections have biases: query, key and value (Qwen2), or also the output (gpt_oss)."""
    qk_norm: bool = False
    """True if a norm is applied to each head of queries and keys before the rotation (Qwen3)."""
    attention_sinks: bool = False
    """True if each head has a learned logit that takes part in the softmax but carries no value (gpt_oss)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for longer sequences; null: not scaled."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm, or LayerNorm, which also subtracts the mean."""
    norm_bias: bool = False
    """True if LayerNorms add a bias."""
    norm_offset: bool = False
    """True if norms multiply by 1 + weight instead of by the weight (Gemma)."""
    norm_places: Literal["before", "after", "both"] = "before"
    """Whether a layer's norms are applied to the inputs of attention and feed-forward, to their outputs (OLMo 2), or to
    both (Gemma 2)."""
    parallel_residual: Literal["none", "one_norm", "two_norms"] = "none"
    """Whether attention and feed-forward both read the layer's input, after one common norm (Cohere) or one norm each
    (GPT-NeoX). With none, the feed-forward reads the sum of the layer's input and the output of attention."""
    qk_norm_over: Literal["head", "all"] = "head"
    """With `qk_norm`: whether a norm covers one head or all heads together (OLMo 2)."""
    mlp_bias: bool = False
    """True if the matrices of the dense feed-forward have biases."""
    rotary_fraction: Annotated[float, Range(0, 1)] = 1.0
    """The fraction of each head that is rotated; the rest does not depend on positions (GPT-NeoX)."""
    rotary_pairs: Literal["halves", "neighbours"] = "halves"
    """Which two elements of a head are rotated together: i and i + half of the rotated part, or 2i and 2i + 1
    (Cohere)."""
    local_rope_theta: PositiveFloat | None = None
    """The base of the rotary frequencies in layers with a window, where `rope_scaling` does not apply (Gemma 3); null:
    the same as in other layers."""
    rotated_layers: Literal["all", "windowed"] = "all"
    """Whether only layers with a window are rotated (Cohere 2)."""
    unrotated_every: NonNegativeInt = 0
    """Every n-th layer is not rotated (SmolLM3); 0: all are."""
    embedding_scale: PositiveFloat = 1.0
    """Factor applied to embedded tokens (Gemma, Granite)."""
    residual_scale: PositiveFloat = 1.0
    """Factor applied to the outputs of attention and feed-forward before they are added (Granite)."""
    logit_scale: PositiveFloat = 1.0
    """Factor applied to logits (Cohere, Granite)."""
    attention_scale: PositiveFloat | None = None
    """Factor applied to attention scores; null: 1 / sqrt(head_dim)."""
    attention_softcap: PositiveFloat | None = None
    """Scores are limited to c tanh(score / c) (Gemma 2); null: no limit. Such attention stores all scores."""
    logit_softcap: PositiveFloat | None = None
    """The same for logits."""
    hf_type: str = ""
    """The model type of transformers that exports write and folders are read as; if empty, the first one that describes
    the model."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.transformer",
        builder="trainspec_cli.engine.models.decoder",
        memory="trainspec_cli.planner.memory.engine.step",
    )

    is_built: ClassVar[bool] = True
    """Whether the engine can train it. A model that it cannot train can still be planned."""
    scans: ClassVar[bool] = False

    @property
    def as_decoder(self) -> DecoderModel:
        return self

    @property
    def rotates(self) -> bool:
        """Return whether positions are encoded by rotating queries and keys."""
        return self.learned_positions == 0 and self.rotary_fraction > 0

    @property
    def rotated_size(self) -> int:
        return self.mla.qk_rope_head_dim if self.mla else int(self.head_dim * self.rotary_fraction)

    @cached_property
    def layer_list(self) -> tuple[Layer, ...]:
        return tuple(self._layer(layer) for layer in range(self.num_layers))

    @property
    def layer_norms(self) -> tuple[LayerNorms, LayerNorms]:
        """Return the norms of attention and those of the feed-forward."""
        before = self.norm_places != "after"
        after = self.norm_places != "before"
        return LayerNorms(before, after), LayerNorms(before and self.parallel_residual != "one_norm", after)

    def rotation_of(self, layer: int) -> Rotation:
        windowed = self.window_of(layer) is not None
        every = self.unrotated_every
        if (
            not self.rotates
            or (every and (layer + 1) % every == 0)
            or (self.rotated_layers == "windowed" and not windowed)
        ):
            return "none"
        return "local" if windowed and self.local_rope_theta is not None else "global"

    def _layer(self, layer: int) -> Layer:
        mixers: tuple[Mixer, Mixer] = "latent" if self.mla else "attention", "feed_forward"
        if self.is_expert_layer(layer):
            mixers = mixers[0], "experts"
        return Layer(mixers, self.window_of(layer), self.rotation_of(layer) != "none")

    def is_expert_layer(self, layer: int) -> bool:
        experts = self.experts
        if experts is None or layer < experts.first_dense_layers:
            return False
        return (layer - experts.first_dense_layers) % experts.every == experts.every - 1

    def window_of(self, layer: int) -> int | None:
        """Return the number of tokens that this layer attends to; None: all previous ones."""
        every = self.global_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window


def embeds_at_both_ends(model: ModelSpec) -> bool:
    """Return whether the last stage of a pipeline also holds the embedding: as its head, or for prediction layers."""
    return model.tied_embeddings or model.prediction_layers > 0


def departs(model: DecoderModel, name: str) -> bool:
    """Return whether a field of a decoder with a default has another value than that."""
    return bool(getattr(model, name) != DecoderModel.__dataclass_fields__[name].default)


LETTERS: dict[str, Mixer] = {"M": "mamba", "*": "attention", "-": "feed_forward", "E": "experts"}


@dataclass(frozen=True)
class HybridModel:
    """State-space layers (Mamba-2, arXiv:2405.21060), alone or mixed with attention, feed-forward and expert layers.

    Every layer is a norm followed by one mixer; the numbers of layers below count each mixer separately, as in
    Nemotron-H."""

    hidden_size: PositiveInt
    """Width of the hidden state between layers."""
    vocab_size: PositiveInt
    """Vocabulary size, in tokens."""
    mamba_layers: NonNegativeInt
    """Number of state-space layers (Mamba-2)."""
    attention_layers: NonNegativeInt = 0
    """Number of attention layers."""
    mlp_layers: NonNegativeInt = 0
    """Number of feed-forward layers."""
    expert_layers: NonNegativeInt = 0
    """Number of layers with a mixture of experts."""
    num_heads: NonNegativeInt = 0
    """Number of attention heads."""
    num_kv_heads: NonNegativeInt = 0
    """Number of key and value heads (grouped-query attention)."""
    head_dim: PositiveInt = 128
    """Width of an attention head."""
    ffn_size: NonNegativeInt = 0
    """Width of the feed-forward."""
    gated_mlp: bool = False
    """True if the feed-forward is gated, with three matrices (SwiGLU) instead of two."""
    experts: ExpertSpec | None = None
    """The experts of `expert_layers`; null: no experts."""
    mamba_expand: PositiveInt = 2
    """Ratio of inner to hidden width in a state-space layer."""
    mamba_head_dim: PositiveInt = 64
    """Width of a state-space head."""
    mamba_num_heads: PositiveInt | None = None
    """Number of heads in a state-space layer; null: mamba_expand x hidden_size / mamba_head_dim."""
    mamba_state_size: PositiveInt = 128
    """State size per channel in a state-space layer."""
    mamba_groups: PositiveInt = 8
    """Number of groups of heads that share the scan's inputs B and C."""
    mamba_step_min: NonNegativeFloat = 0.0
    """Lower limit of the scan's step dt, which a state-space layer computes for each token and head."""
    mamba_step_max: PositiveFloat | None = None
    """Upper limit of the step; null: no limit."""
    family: Literal["hybrid"] = "hybrid"
    """The name of the model family."""
    name: str = ""
    """The model's name in plans and reports."""
    tied_embeddings: bool = False
    """True if input embedding and output head share one matrix."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    layer_pattern: str = ""
    """One letter per layer: M Mamba, * attention, - feed-forward, E experts. If empty, each kind is distributed
    evenly."""
    rotary_fraction: Annotated[float, Range(0, 1)] = 0.0
    """The fraction of each attention head that is rotated by position (Bamba); 0: attention does not encode
    positions."""
    rope_theta: PositiveFloat = 10_000.0
    """The base of the rotary frequencies."""
    hf_type: str = ""
    """The model type of transformers that exports write and folders are read as; if empty, the first one that describes
    the model."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.ssm",
        builder="trainspec_cli.engine.models.hybrid",
        memory="trainspec_cli.planner.memory.engine.step",
        refuses={
            "cp": "a state-space scan runs along the full sequence",
            "lora": "only decoders can have adapters",
            "fp8": "it is implemented only for the linear layers of decoders",
        },
    )
    is_built: ClassVar[bool] = True
    prediction_layers: ClassVar[int] = 0
    learned_positions: ClassVar[int] = 0

    @property
    def rotates(self) -> bool:
        return self.attention_layers > 0 and self.rotary_fraction > 0

    @property
    def rotated_size(self) -> int:
        return int(self.head_dim * self.rotary_fraction)

    @property
    def scans(self) -> bool:
        return self.mamba_layers > 0

    @property
    def num_layers(self) -> int:
        return self.mamba_layers + self.attention_layers + self.mlp_layers + self.expert_layers

    @property
    def layer_counts(self) -> dict[str, int]:
        """Letter in the pattern -> number of layers of that kind."""
        return {
            "M": self.mamba_layers,
            "*": self.attention_layers,
            "-": self.mlp_layers,
            "E": self.expert_layers,
        }

    @property
    def layers(self) -> str:
        """Return the pattern or, if it is empty, an even distribution of the kinds."""
        places = [(i + 0.5) / count for count in self.layer_counts.values() for i in range(count)]
        letters = [letter for letter, count in self.layer_counts.items() for _ in range(count)]
        even = "".join(letter for _, letter in sorted(zip(places, letters, strict=True), key=lambda pair: pair[0]))
        return self.layer_pattern or even

    @cached_property
    def layer_list(self) -> tuple[Layer, ...]:
        return tuple(Layer((LETTERS[letter],)) for letter in self.layers)

    @property
    def mamba_heads(self) -> int:
        return self.mamba_num_heads or self.mamba_expand * self.hidden_size // self.mamba_head_dim

    @property
    def limits_step(self) -> bool:
        return self.mamba_step_min > 0 or self.mamba_step_max is not None

    @property
    def as_decoder(self) -> DecoderModel:
        """Return the attention, feed-forward and expert layers as a decoder."""
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
            rotary_fraction=self.rotary_fraction if self.rotates else 0.0,
            rope_theta=self.rope_theta,
        )


@dataclass(frozen=True)
class OwnModel:
    """User-defined blocks between trainspec's embedding and its final norm and head."""

    num_layers: PositiveInt
    """Number of layers, each of which is a user-defined block."""
    hidden_size: PositiveInt
    """Width of the hidden state between layers."""
    vocab_size: PositiveInt
    """Vocabulary size, in tokens."""
    block: str = ""
    """The function that creates a block, called as `make(hidden_size, layer, **options)`: `FILE.py:NAME`,
    `package.module:NAME`, or a name registered by a package."""
    block_params: PositiveInt | None = None
    """Number of parameters in a block; null: a separate process creates a block and counts them. A run rejects a wrong
    number."""
    options: dict[str, Option] = field(default_factory=dict, hash=False)
    """Additional arguments for the block, by name."""
    block_mixing_flops_per_token: NonNegativeFloat = 0.0
    """FLOPs per token in a block's forward pass that do not involve weights, such as those of attention scores."""
    block_saved_bytes_per_token: NonNegativeFloat | None = None
    """Bytes per token that a block keeps for its backward pass, in bf16; null: the same as for a transformer with this
    many parameters."""
    family: Literal["own"] = "own"
    """The name of the model family."""
    name: str = ""
    """The model's name in plans and reports."""
    tied_embeddings: bool = False
    """True if input embedding and output head share one matrix."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in the final RMSNorm."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.own",
        builder="trainspec_cli.engine.models.own",
        refuses={
            "tp": "the engine cannot shard user-defined blocks",
            "cp": "user-defined blocks need full sequences",
            "lora": "only decoders can have adapters",
            "fp8": "it is implemented only for the linear layers of decoders",
            "muon": "the plan does not know the matrices of user-defined blocks",
        },
    )
    is_built: ClassVar[bool] = True
    experts: ClassVar[None] = None
    learned_positions: ClassVar[int] = 0
    prediction_layers: ClassVar[int] = 0
    rotates: ClassVar[bool] = False
    scans: ClassVar[bool] = False


@dataclass(frozen=True)
class TracedPart:
    """Blocks of one kind in a model of transformers, or everything outside its blocks, as counted without memory."""

    shapes: tuple[str, ...]
    """Shape of each parameter, such as `64x32`."""
    count: PositiveInt = 1
    """Number of these blocks."""
    linears: tuple[str, ...] = ()
    """Name and shape of each linear layer, such as `q_proj 64x32`."""
    flops_per_token: NonNegativeFloat = 0.0
    """FLOPs per token in the forward pass."""
    bytes_: dict[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Memory of a micro-batch's activations by kind of recomputation (outside the blocks: `before` and `after` them).
    Six numbers: bytes kept for the backward pass, peak of the forward pass, and peak of the backward pass, each as a
    fixed number of bytes and a number per sample."""

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Return (rows, elements per row) of each parameter."""
        sizes = [[int(size) for size in shape.split("x")] for shape in self.shapes]
        return tuple((first, math.prod(rest)) for first, *rest in sizes)

    @property
    def params(self) -> int:
        return sum(rows * row for rows, row in self.matrices)

    def kept_bytes(self, kind: str, samples: float) -> float:
        return self._at(kind, 0, samples)

    def forward_bytes(self, kind: str, samples: float) -> float:
        return self._at(kind, 2, samples)

    def backward_bytes(self, kind: str, samples: float) -> float:
        return self._at(kind, 4, samples)

    def _at(self, kind: str, place: int, samples: float) -> float:
        fixed, each = self.bytes_[kind][place : place + 2]
        return fixed + samples * each

    @property
    def linear_sizes(self) -> tuple[tuple[str, int, int], ...]:
        """Return (name, outputs, inputs) of each linear layer."""
        found = (linear.partition(" ") for linear in self.linears)
        return tuple((name, *(int(size) for size in shape.split("x"))) for name, _, shape in found)  # type: ignore[misc]


@dataclass(frozen=True)
class TransformersModel:
    """A causal language model of the transformers package, computed by its own module.

    trainspec fills in all but the folder, the name and the permission to run code: a separate process builds the model
    without memory, counts it, and traces it."""

    config: str
    """The content of the model's config.json."""
    num_layers: PositiveInt
    """Number of blocks."""
    hidden_size: PositiveInt
    """Width of the hidden state between blocks."""
    vocab_size: PositiveInt
    """Number of rows of the embedding."""
    block_list: str
    """Name of the module's list of blocks, such as `model.layers`."""
    prefix: str
    """The first part of the tensors' names, which some folders leave out; empty if there is none."""
    blocks: tuple[TracedPart, ...]
    """The kinds of blocks."""
    outside: TracedPart
    """Everything outside the blocks."""
    traced_seq_len: PositiveInt
    """Number of tokens per sample in the trace."""
    traced_width: PositiveInt
    """Number of bytes per value in the trace."""
    tied_embeddings: bool = False
    """True if input embedding and output head share one matrix."""
    learned_positions: NonNegativeInt = 0
    """Number of positions in the module's table of positions, the longest sample; 0 if it has no such table."""
    folder: str = ""
    """The folder with the model's config.json and, with `trust_remote_code`, its code."""
    trust_remote_code: bool = False
    """Run the Python files in the folder that its config.json names in `auto_map`. They run with your permissions."""
    backend: Literal["transformers"] = "transformers"
    """The package whose module is trained."""
    family: Literal["transformers"] = "transformers"
    """The name of the model family."""
    name: str = ""
    """The model's name in plans and reports."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.traced",
        builder="trainspec_cli.engine.models.transformers_module",
        memory="trainspec_cli.planner.memory.engine.traced",
        refuses={
            "tp": "the engine does not know which matrices of a transformers module can be split",
            "cp": "the attention of a transformers module needs full sequences",
            "pp": "the engine cannot divide the forward pass of a transformers module",
            "ep": "the engine cannot spread the experts of a transformers module",
            "nf4": "the matrices of a transformers module stay in full precision",
            "fp8": "it is implemented only for the linear layers of decoders",
            "muon": "the plan does not know the matrices of a transformers module",
            "loss": "a transformers module computes its logits itself",
            "kernels": "a transformers module uses the kernels of transformers",
        },
    )
    is_built: ClassVar[bool] = True
    experts: ClassVar[None] = None
    prediction_layers: ClassVar[int] = 0
    rotates: ClassVar[bool] = True
    """Whether documents can be kept apart: the first step finds out (`engine/models/transformers_module.py`)."""
    scans: ClassVar[bool] = False

    @property
    def parts(self) -> tuple[TracedPart, ...]:
        return (*self.blocks, self.outside)


@dataclass(frozen=True)
class ConvModel:
    """Convolutional network: a residual classifier or detector in 2-D, or a U-Net in 2-D or 3-D."""

    architecture: Literal["resnet", "retinanet", "maskrcnn", "unet"]
    """retinanet and maskrcnn are a resnet with a feature pyramid and detection heads; they can only be planned."""
    input_size: tuple[PositiveInt, ...]
    """Size of one sample, such as (224, 224), or (128, 128, 128) for volumes."""
    widths: tuple[PositiveInt, ...]
    """Number of channels in each stage (resnet: inside the bottlenecks; U-Net: from top to bottom)."""
    blocks: tuple[PositiveInt, ...] = (3, 4, 6, 3)
    """Number of blocks per stage (resnet)."""
    in_channels: PositiveInt = 3
    """Number of channels in a sample."""
    num_classes: PositiveInt = 1000
    """Number of classes of a sample or, for a U-Net, of each voxel; voxel class 0 is the background."""
    groups: PositiveInt = 1
    """Number of groups in the 3x3 convolutions, such as 32 in ResNeXt-50 32x4d."""
    family: Literal["conv"] = "conv"
    """The name of the model family."""
    name: str = ""
    """The model's name in plans and reports."""

    unit: ClassVar[Literal["samples"]] = "samples"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.cnn",
        builder="trainspec_cli.engine.models.conv",
        memory="trainspec_cli.planner.memory.engine.conv",
        refuses={
            "tp": "convolutions are not sharded",
            "cp": "images have no sequence",
            "pp": "its stages differ in shape",
            "lora": "only decoders can have adapters",
            "fp8": "it is implemented only for the linear layers of decoders",
            # Inductor in torch 2.13 raises "Invalid ranges [0:-1]" for a 3-D convolution with dynamic sizes, which
            # dynamo assumes once a class of blocks has seen two shapes. With static sizes (dynamic=False), 2-D and 3-D
            # models train to the same loss, but no step was faster on a CPU: convolutions are library calls, and batch
            # norm, whose sums run over all ranks, stays eager. Every shape is compiled, and ResNet-50 has more shapes
            # than dynamo's limit of 8.
            "compile": "torch.compile cannot lower its convolutions of several shapes, and batch norm stays eager",
            "elastic": "batch norm computes its statistics over all samples, and replica groups do not share them",
        },
    )
    num_layers: ClassVar[int] = 1
    """For a pipeline, the entire network is one layer, which cannot be divided."""
    hidden_size: ClassVar[int] = 0
    prediction_layers: ClassVar[int] = 0
    learned_positions: ClassVar[int] = 0
    tied_embeddings: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    scans: ClassVar[bool] = False
    experts: ClassVar[None] = None

    @property
    def is_built(self) -> bool:
        """Return whether the engine can train it. A model that it cannot train can still be planned."""
        return self.architecture in ("resnet", "unet")

    @property
    def segments(self) -> bool:
        """Return whether every voxel has a class, instead of the sample as a whole."""
        return self.architecture == "unet"

    @property
    def expansion(self) -> int:
        """Return the ratio of a bottleneck's output channels to those inside it; ResNeXt's bottlenecks are twice as
        wide inside."""
        return 4 if self.groups == 1 else 2


TextModel = DecoderModel | HybridModel
ModelSpec = TextModel | OwnModel | TransformersModel | ConvModel


def derive_head_dim(model: Mapping[str, object]) -> int | None:
    """Return the width of a head of a decoder that does not state it, given the keys of its section: the hidden size
    divided by the number of heads. None if it is stated or cannot be derived."""
    hidden, heads = model.get("hidden_size"), model.get("num_heads")
    is_open = model.get("family", "decoder") == "decoder" and model.get("head_dim", MISSING) == MISSING
    if not is_open or type(hidden) is not int or type(heads) is not int or heads < 1 or hidden % heads:
        return None
    return hidden // heads


def has_layer_list(model: ModelSpec) -> TypeGuard[DecoderModel | HybridModel]:
    """Return whether the model's layers consist of the mixers that the planner can count tensor by tensor.

    Membership in `TextModel` does not imply this: user-defined blocks and added families have no `layer_list`."""
    return hasattr(model, "layer_list")


AUTO_FAMILY = "auto"
"""The `family` of a model that is described by the checkpoint in `init.from`."""
