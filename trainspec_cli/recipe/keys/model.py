"""The models that a recipe can train: one frozen dataclass per family, each with the family's record.

`family` tells them apart in YAML, `unit` what a batch is counted in. docs/adding-a-model.md adds another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, ClassVar, Literal, NamedTuple, TypeGuard

from trainspec_cli.recipe.field_types import NonNegativeFloat, NonNegativeInt, Option, PositiveFloat, PositiveInt, Range

# Parts of which models are put together, and the sizes that layers have of their own: facts that the engine builds by
# and the planner counts by.


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


@dataclass(frozen=True)
class FamilyRecord:
    """A family: the modules of its work, memory and layers, and what it cannot be used with. The modules are named
    and not imported: the planner imports its own, and the engine, which alone imports torch, its own."""

    work: str
    """Module of the planner: parameters, FLOPs and the work of the layers (`planner.workload.FamilyWork`)."""
    builder: str
    """Module of the engine: `build(model, seq_len, layers)` makes the torch module."""
    memory: str = ""
    """Module of the planner: `replay(run, pipeline_rank)` counts a step's memory tensor by tensor. Empty: the planner
    estimates it as it does for other frameworks."""
    refuses: Mapping[str, str] = field(default_factory=dict)
    """What the engine cannot do with such a model, and why: an axis of the layout, or one of `FEATURES`."""


FEATURES = ("lora", "fp8", "compile", "elastic", "muon")


@dataclass(frozen=True)
class DecoderModel:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU.

    The fields below `norm_eps` describe deviations from that.
    """

    num_layers: PositiveInt
    """Layers, each with attention and a feed-forward."""
    hidden_size: PositiveInt
    """Width of a token's vector between the layers."""
    num_heads: PositiveInt
    """Attention heads."""
    num_kv_heads: PositiveInt
    """Heads of keys and values (grouped-query attention); as many as `num_heads` in plain attention."""
    head_dim: PositiveInt
    """Width of a head."""
    ffn_size: PositiveInt
    """Width of the feed-forward (a gated one, SwiGLU, has three matrices of hidden_size x ffn_size)."""
    vocab_size: PositiveInt
    """Tokens that the model knows."""
    family: Literal["decoder"] = "decoder"
    """The family of models: decoder."""
    name: str = ""
    """The model's name, as plans and reports show it."""
    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""
    rope_theta: PositiveFloat = 10_000.0
    """The base of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    gated_mlp: bool = True
    """False: two matrices (GPT, MPT, Nemotron) instead of three."""
    learned_positions: NonNegativeInt = 0
    """Rows of a learned position table; 0 for rotary or ALiBi."""
    sliding_window: PositiveInt | None = None
    """Tokens that a windowed layer attends to; null: all before it."""
    global_attention_every: NonNegativeInt = 1
    """With a window: every n-th layer attends to everything; 0: none does."""
    mla: LatentAttentionSpec | None = None
    """Latent attention in place of grouped-query attention; null: none."""
    experts: ExpertSpec | None = None
    """A mixture of experts in place of the feed-forward; null: none."""
    prediction_layers: NonNegativeInt = 0
    """Extra layers that predict further tokens (multi-token prediction, DeepSeek-V3). The planner counts them; the
    engine does not build them."""
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    gate_limit: PositiveFloat | None = None
    """Gate and linear half of the experts are clamped to it, the gate weighed by sigmoid(1.702 x), 1 added to the
    linear half (gpt_oss)."""
    attention_bias: Literal["none", "qkv", "all"] = "none"
    """Biases of the query, key and value projections (Qwen2), or of the output's too (gpt_oss)."""
    qk_norm: bool = False
    """A norm over each query's and each key's head before the rotation (Qwen3)."""
    attention_sinks: bool = False
    """A learned logit a head that takes part in the softmax and carries no value (gpt_oss)."""
    rope_scaling: RopeScaling | None = None
    """Rotary frequencies stretched for longer sequences; null: none."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.transformer",
        builder="trainspec_cli.engine.models.decoder",
        memory="trainspec_cli.planner.memory.engine.step",
    )

    @property
    def is_built(self) -> bool:
        """The engine can train it; what it cannot train can still be planned."""
        return self.prediction_layers == 0

    scans: ClassVar[bool] = False

    @property
    def as_decoder(self) -> DecoderModel:
        return self

    @property
    def rotates(self) -> bool:
        """Positions are turned into queries and keys."""
        return self.learned_positions == 0

    @property
    def rotated_size(self) -> int:
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @cached_property
    def layer_list(self) -> tuple[Layer, ...]:
        return tuple(self._layer(layer) for layer in range(self.num_layers))

    def _layer(self, layer: int) -> Layer:
        mixers: tuple[Mixer, Mixer] = "latent" if self.mla else "attention", "feed_forward"
        if self.is_expert_layer(layer):
            mixers = mixers[0], "experts"
        return Layer(mixers, self.window_of(layer))

    def is_expert_layer(self, layer: int) -> bool:
        experts = self.experts
        if experts is None or layer < experts.first_dense_layers:
            return False
        return (layer - experts.first_dense_layers) % experts.every == experts.every - 1

    def window_of(self, layer: int) -> int | None:
        """Tokens that this layer attends to; None: all before it."""
        every = self.global_attention_every
        return None if every and (layer + 1) % every == 0 else self.sliding_window


LETTERS: dict[str, Mixer] = {"M": "mamba", "*": "attention", "-": "feed_forward", "E": "experts"}


@dataclass(frozen=True)
class HybridModel:
    """State-space layers (Mamba-2, arXiv:2405.21060), alone or with attention, feed-forward and expert layers between.

    Every layer is one mixer behind a norm: the counts below are of single layers, as in Nemotron-H.
    """

    hidden_size: PositiveInt
    """Width of a token's vector between the layers."""
    vocab_size: PositiveInt
    """Tokens that the model knows."""
    mamba_layers: NonNegativeInt
    """State-space layers (Mamba-2)."""
    attention_layers: NonNegativeInt = 0
    """Attention layers."""
    mlp_layers: NonNegativeInt = 0
    """Feed-forward layers."""
    expert_layers: NonNegativeInt = 0
    """Layers of a mixture of experts."""
    num_heads: NonNegativeInt = 0
    """Attention heads."""
    num_kv_heads: NonNegativeInt = 0
    """Heads of keys and values (grouped-query attention)."""
    head_dim: PositiveInt = 128
    """Width of an attention head."""
    ffn_size: NonNegativeInt = 0
    """Width of the feed-forward."""
    gated_mlp: bool = False
    """True: three matrices (SwiGLU) instead of two."""
    experts: ExpertSpec | None = None
    """The experts of `expert_layers`; null: none."""
    mamba_expand: PositiveInt = 2
    """Inner width over hidden width."""
    mamba_head_dim: PositiveInt = 64
    """Width of a state-space head."""
    mamba_num_heads: PositiveInt | None = None
    """null: mamba_expand x hidden_size / mamba_head_dim."""
    mamba_state_size: PositiveInt = 128
    """States of each channel of a state-space layer."""
    mamba_groups: PositiveInt = 8
    """Groups of heads that share the scan's inputs B and C."""
    family: Literal["hybrid"] = "hybrid"
    """The family of models: hybrid."""
    name: str = ""
    """The model's name, as plans and reports show it."""
    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in RMSNorm."""
    activation: Activation = "silu"
    """The activation of the feed-forward and the experts."""
    layer_pattern: str = ""
    """One letter a layer: M Mamba, * attention, - feed-forward, E experts. Empty: each kind spread evenly."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.ssm",
        builder="trainspec_cli.engine.models.hybrid",
        memory="trainspec_cli.planner.memory.engine.step",
        refuses={
            "cp": "a state-space scan runs along the whole sequence",
            "lora": "adapters are for decoders",
            "fp8": "it is built for decoders' linear layers alone",
        },
    )
    is_built: ClassVar[bool] = True
    prediction_layers: ClassVar[int] = 0
    learned_positions: ClassVar[int] = 0
    rotates: ClassVar[bool] = False
    rotated_size: ClassVar[int] = 0

    @property
    def scans(self) -> bool:
        return self.mamba_layers > 0

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

    @cached_property
    def layer_list(self) -> tuple[Layer, ...]:
        return tuple(Layer((LETTERS[letter],)) for letter in self.layers)

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
class OwnModel:
    """Blocks of one's own between our embedding, final norm and head."""

    num_layers: PositiveInt
    """Layers, each a block of one's own."""
    hidden_size: PositiveInt
    """Width of a token's vector between the layers."""
    vocab_size: PositiveInt
    """Tokens that the model knows."""
    block: str = ""
    """What makes a block, called as `make(hidden_size, layer, **options)`: `FILE.py:NAME`, `package.module:NAME`, or a
    name that a package registered."""
    block_params: PositiveInt | None = None
    """The parameters of a block; null: another process makes a block and counts them. A run refuses another number."""
    options: dict[str, Option] = field(default_factory=dict, hash=False)
    """Further arguments of the block, by name."""
    block_mixing_flops_per_token: NonNegativeFloat = 0.0
    """FLOPs of a block's forward, a token, in which no weight takes part, such as those of scores between tokens."""
    block_saved_bytes_per_token: NonNegativeFloat | None = None
    """Bytes of a token that a block keeps for its backward, in bf16; null: as many as a transformer's of so many
    parameters."""
    family: Literal["own"] = "own"
    """The family of models: own."""
    name: str = ""
    """The model's name, as plans and reports show it."""
    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the mean square in the final RMSNorm."""

    unit: ClassVar[Literal["tokens"]] = "tokens"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.own",
        builder="trainspec_cli.engine.models.own",
        refuses={
            "tp": "the engine cannot cut blocks of one's own",
            "cp": "blocks of one's own see whole sequences",
            "lora": "adapters are for decoders",
            "fp8": "it is built for decoders' linear layers alone",
            "muon": "the plan does not know the matrices in blocks of one's own",
        },
    )
    is_built: ClassVar[bool] = True
    experts: ClassVar[None] = None
    learned_positions: ClassVar[int] = 0
    prediction_layers: ClassVar[int] = 0
    rotates: ClassVar[bool] = False
    scans: ClassVar[bool] = False


@dataclass(frozen=True)
class ConvModel:
    """Convolutional network: a residual classifier or detector in 2-D, or a U-Net in 2-D or 3-D."""

    architecture: Literal["resnet", "retinanet", "maskrcnn", "unet"]
    """retinanet and maskrcnn are a resnet with a feature pyramid and detection heads on top; they can be planned."""
    input_size: tuple[PositiveInt, ...]
    """Extent of one sample: (224, 224), or (128, 128, 128) for volumes."""
    widths: tuple[PositiveInt, ...]
    """Channels of each stage (of a resnet: inside its bottlenecks; of a U-Net: from top to bottom)."""
    blocks: tuple[PositiveInt, ...] = (3, 4, 6, 3)
    """Blocks a stage (resnet)."""
    in_channels: PositiveInt = 3
    """Channels of a sample."""
    num_classes: PositiveInt = 1000
    """Classes of a sample, or for a U-Net of each voxel; class 0 of voxels is the background."""
    groups: PositiveInt = 1
    """Groups of the 3x3 convolutions: 32 in ResNeXt-50 32x4d."""
    family: Literal["conv"] = "conv"
    """The family of models: conv."""
    name: str = ""
    """The model's name, as plans and reports show it."""

    unit: ClassVar[Literal["samples"]] = "samples"
    record: ClassVar[FamilyRecord] = FamilyRecord(
        work="trainspec_cli.planner.workload.cnn",
        builder="trainspec_cli.engine.models.conv",
        memory="trainspec_cli.planner.memory.engine.conv",
        refuses={
            "tp": "convolutions are not cut",
            "cp": "images have no sequence",
            "pp": "its stages differ in shape",
            "lora": "adapters are for decoders",
            "fp8": "it is built for decoders' linear layers alone",
            # Inductor of torch 2.13 raises "Invalid ranges [0:-1]" for a 3-D convolution of dynamic sizes, which dynamo
            # assumes once a class of blocks has met two shapes. With static sizes (dynamic=False) both kinds train to
            # the same loss, but no step was faster on a CPU: convolutions are library calls, and batch norm, whose sums
            # run over all ranks, stays eager. Every shape is compiled, and ResNet-50 has more than dynamo's limit of 8.
            "compile": "torch.compile cannot lower its convolutions of several shapes, and batch norm stays eager",
            "elastic": "batch norm takes its statistics over all samples, and replica groups do not share them",
        },
    )
    num_layers: ClassVar[int] = 1
    """One unit to a pipeline, which cannot cut it."""
    hidden_size: ClassVar[int] = 0
    prediction_layers: ClassVar[int] = 0
    learned_positions: ClassVar[int] = 0
    tied_embeddings: ClassVar[bool] = False
    rotates: ClassVar[bool] = False
    experts: ClassVar[None] = None

    @property
    def is_built(self) -> bool:
        """The engine can train it; what it cannot train can still be planned."""
        return self.architecture in ("resnet", "unet")

    @property
    def segments(self) -> bool:
        """Every voxel has a class, and not the sample as a whole."""
        return self.architecture == "unet"

    @property
    def expansion(self) -> int:
        """Channels of a bottleneck's output over those inside; ResNeXt's are twice as wide inside."""
        return 4 if self.groups == 1 else 2


TextModel = DecoderModel | HybridModel
ModelSpec = TextModel | OwnModel | ConvModel


def has_layer_list(model: ModelSpec) -> TypeGuard[DecoderModel | HybridModel]:
    """Return whether the model's layers are made of the mixers that the planner knows tensor by tensor.

    Membership in `TextModel` does not say so: blocks of a user and of added families have no `layer_list`.
    """
    return hasattr(model, "layer_list")


AUTO_FAMILY = "auto"
"""The `family` of a model that the checkpoint of `init.from` describes."""
