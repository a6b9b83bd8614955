"""The model types of transformers that the engine's decoder can represent: for each, how the keys of config.json
correspond to the fields of `DecoderModel`, and the names of its tensors.

A type is a row of `FAMILIES`. Its rules (`family_rules.py`) both read a config.json and write one. A model can be
written as a type if reading what was written gives the same model (`config.model_type`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from trainspec_cli.core.json_value import JsonValue
from trainspec_cli.data.huggingface.family_rules import (
    ACTIVATIONS,
    Always,
    DenseFirst,
    ErnieLayers,
    ExpertKeys,
    Falcon,
    FullLayers,
    GroupChoice,
    Key,
    LatentKeys,
    LayerWindows,
    Number,
    Only,
    PackedExperts,
    PredictionLayers,
    RotaryDim,
    Rotation,
    Rule,
    Unrotated,
    ValueMap,
)
from trainspec_cli.recipe.keys.model import DecoderModel

# Tensors


@dataclass(frozen=True)
class Names:
    """The names of a type's tensors. Keys are the engine's names within a layer."""

    layer: Mapping[str, str]
    embed: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    layers: str = "model.layers"
    positions: str = "model.embed_positions"
    fused: Callable[[DecoderModel], Iterator[tuple[str, str, int, int, int]]] | None = None
    """Yields for matrices that are parts of one tensor: (the engine's name, name of the tensor, first row of the
    matrix, first row in the tensor, number of rows)."""
    transposed: bool = False
    """True if the matrices of layers are stored transposed (GPT-2)."""
    experts: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices: gate, linear half, output. With two names, experts are stacked in one tensor."""
    alternating: bool = False
    """With two names: True if matrices have the engine's order of dimensions, and the columns of gate and linear half
    alternate (gpt_oss)."""
    moe: str = "mlp"
    router: str = "gate"
    shared: str = "shared_expert"
    prefix: str = ""
    """The beginning of all names but the head's, which some published folders leave out."""
    merged: int = 1
    """Number of the engine's layers that are one layer of the type."""
    two_norms: Mapping[str, str] = field(default_factory=dict)
    """Other names in models whose attention and feed-forward have a norm each, side by side."""
    choice_bias: str = ""
    """Name of the bias for the choice of experts; empty if the type has none."""
    choice_bias_leading: tuple[int, ...] = ()
    """Dims of size 1 before the bias's own."""
    predicts: bool = False
    """True if layers that predict further tokens follow the others, with DeepSeek-V3's names."""

    def of_layer(self, model: DecoderModel) -> Mapping[str, str]:
        if model.mla and model.mla.q_lora_rank:
            return {**self.layer, "attention.q": "self_attn.q_b_proj"}
        return {**self.layer, **self.two_norms} if model.parallel_residual == "two_norms" else self.layer


LLAMA = {
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention.sinks": "self_attn.sinks",
    "ffn_norm": "post_attention_layernorm",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
_LATENT = LLAMA | {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
}
_OUTPUT_NORMS = {"attention_out_norm": "post_attention_layernorm", "ffn_out_norm": "post_feedforward_layernorm"}
_GEMMA2 = LLAMA | _OUTPUT_NORMS | {"ffn_norm": "pre_feedforward_layernorm"}
_GPT_NEOX = LLAMA | {
    "attention.out": "attention.dense",
    "ffn.up": "mlp.dense_h_to_4h",
    "ffn.down": "mlp.dense_4h_to_h",
}
_FALCON = _GPT_NEOX | {"attention.out": "self_attention.dense"}
_GPT2 = {
    "attention_norm": "ln_1",
    "attention.out": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn.up": "mlp.c_fc",
    "ffn.down": "mlp.c_proj",
}

Fused = Iterator[tuple[str, str, int, int, int]]


def _joined_qkv(tensor: str) -> Callable[[DecoderModel], Fused]:
    """All queries, then all keys, then all values."""

    def parts(model: DecoderModel) -> Fused:
        at = 0
        for name, heads in (("q", model.num_heads), ("k", model.num_kv_heads), ("v", model.num_kv_heads)):
            rows = heads * model.head_dim
            yield f"attention.{name}", tensor, 0, at, rows
            at += rows

    return parts


def _grouped_qkv(tensor: str) -> Callable[[DecoderModel], Fused]:
    """The queries of a group of heads, then their key and their value."""

    def parts(model: DecoderModel) -> Fused:
        size = model.head_dim
        queries = model.num_heads // model.num_kv_heads * size
        for group in range(model.num_kv_heads):
            at = group * (queries + 2 * size)
            yield "attention.q", tensor, group * queries, at, queries
            yield "attention.k", tensor, group * size, at + queries, size
            yield "attention.v", tensor, group * size, at + queries + size, size

    return parts


def _gate_up(model: DecoderModel) -> Fused:
    yield "ffn.gate", "mlp.gate_up_proj", 0, 0, model.ffn_size
    yield "ffn.up", "mlp.gate_up_proj", 0, model.ffn_size, model.ffn_size


def _phi3(model: DecoderModel) -> Fused:
    yield from _joined_qkv("self_attn.qkv_proj")(model)
    yield from _gate_up(model)


# The table


@dataclass(frozen=True)
class HubType:
    """A model type of transformers."""

    architecture: str
    rules: tuple[Rule, ...]
    names: Names = Names(LLAMA)
    family: Literal["decoder", "hybrid"] = "decoder"


def _sizes(**keys: str) -> tuple[Rule, ...]:
    """Return the rules for sizes. `keys` are keys whose names are not those of Llama."""

    def name(of: str) -> str:
        return keys.get(of, of)

    return (
        Key("num_layers", name("num_hidden_layers"), int),
        Key("hidden_size", name("hidden_size"), int),
        Key("num_heads", name("num_attention_heads"), int),
        Key("vocab_size", "vocab_size", int),
    )


_KV_HEADS = Key("num_kv_heads", "num_key_value_heads", int, lambda model: model["num_heads"])
_HEAD_DIM = Key("head_dim", "head_dim", int, lambda model: model["hidden_size"] // max(model["num_heads"], 1))
_DERIVED_HEAD_DIM = Always({"head_dim": lambda model: model["hidden_size"] // max(model["num_heads"], 1)})
_FFN = Key("ffn_size", "intermediate_size", int)
_UNQUANTISED = Only("quantization_config", (None,))


def _tied(default: bool) -> Rule:
    return Key("tied_embeddings", "tie_word_embeddings", bool, default)


def _eps(name: str = "rms_norm_eps", default: float = 1e-6) -> Rule:
    return Key("norm_eps", name, float, default)


def _activation(name: str = "hidden_act", default: str = "silu") -> Rule:
    return ValueMap("activation", name, ACTIVATIONS, default)


def _biased(name: str, values: tuple[str, str] = ("none", "all"), *, default: bool = False) -> Rule:
    return ValueMap("attention_bias", name, dict(zip((False, True), values, strict=True)), default)


def _softcaps(attention: float | None, logit: float | None) -> tuple[Rule, ...]:
    """Return the rules for the limits of scores and logits, with their defaults."""
    return (
        Key("attention_softcap", "attn_logit_softcapping", float, attention, has_null=True),
        Key("logit_softcap", "final_logit_softcapping", float, logit, has_null=True),
    )


_MLP_BIAS = Key("mlp_bias", "mlp_bias", bool, False)


def _llama(*, tied: bool = False, eps: float = 1e-6) -> tuple[Rule, ...]:
    """Return the rules that most types share. `tied`, `eps`: the defaults in transformers."""
    return (*_sizes(), _KV_HEADS, _HEAD_DIM, _FFN, _UNQUANTISED, _tied(tied), _eps("rms_norm_eps", eps), _activation())


_LLAMA = _llama()
_LAYER_NORM = Always({"norm": "layer", "norm_bias": True})
_NOT_GATED = Always({"gated_mlp": False})
_QK_NORM = Always({"qk_norm": True})
_QK_NORM_OVER_ALL = Always({"qk_norm": True, "qk_norm_over": "all"})
_GEMMA = (
    *(*_sizes(), _KV_HEADS, Key("head_dim", "head_dim", int, 256), _FFN, _UNQUANTISED, _tied(True), _eps()),
    Always({"norm_offset": True, "embedding_scale": lambda model: math.sqrt(model["hidden_size"])}),
    _biased("attention_bias"),
)
_GEMMA2_RULES = (
    *(*_GEMMA, _activation("hidden_activation", "gelu_pytorch_tanh")),
    Always({"norm_places": "both"}),
    Number("attention_scale", "query_pre_attn_scalar", lambda x: x**-0.5, lambda x: round(x**-2), default=256.0),
    Only("use_bidirectional_attention", (None, False)),
)
_GRANITE = (
    Number("embedding_scale", "embedding_multiplier", lambda x: x),
    Number("residual_scale", "residual_multiplier", lambda x: x),
    Number("attention_scale", "attention_multiplier", lambda x: x),
    Number("logit_scale", "logits_scaling", lambda x: 1 / x),
)
_GLM = (
    *_llama(eps=1.5625e-07),
    _biased("attention_bias", ("none", "qkv"), default=True),
    Rotation(fraction=0.5),
    Always({"rotary_pairs": "neighbours"}),
)
_COHERE = (
    *(*_sizes(), _KV_HEADS, _FFN, _UNQUANTISED, _tied(True), _eps("layer_norm_eps", 1e-5), _activation()),
    Always({"norm": "layer", "parallel_residual": "one_norm", "rotary_pairs": "neighbours"}),
    Key("logit_scale", "logit_scale", float, 0.0625),
    _biased("attention_bias"),
)
_QWEN_EXPERTS = {
    "num_experts": "num_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
    "normalise_weights": "norm_topk_prob",
}
_GPT_OSS_YARN: Mapping[str, JsonValue] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_DEEPSEEK = (
    *(*_sizes(), _FFN, _UNQUANTISED, _tied(False), _activation()),
    *(Only("attention_bias", (False,)), Only("moe_layer_freq", (1,)), Rotation(latent=True)),
)
_INTERLEAVE = ValueMap("rotary_pairs", "rope_interleave", {True: "neighbours", False: "halves"}, True)
_DEEPSEEK_EXPERTS = {
    "num_experts": "n_routed_experts",
    "top_k": "num_experts_per_tok",
    "expert_ffn_size": "moe_intermediate_size",
    "shared_experts": "n_shared_experts",
    "first_dense_layers": "first_k_dense_replace",
    "normalise_weights": "norm_topk_prob",
    "weight_scale": "routed_scaling_factor",
    "num_groups": "n_group",
    "top_groups": "topk_group",
}
_WITHOUT_FIRST = {name: key for name, key in _DEEPSEEK_EXPERTS.items() if name != "first_dense_layers"}
_CHOICE_BY_SIGMOID: dict[str, JsonValue] = {"score": "sigmoid", "choice_bias": True}


def _deepseek_experts(
    sizes: Mapping[str, JsonValue], choice: Mapping[str, JsonValue], keys: Mapping[str, str] = _DEEPSEEK_EXPERTS
) -> Rule:
    """Return the rule for experts of DeepSeek-V3's kind, with the type's defaults."""
    return ExpertKeys(keys, _CHOICE_BY_SIGMOID, {**sizes, **choice})


_DEEPSEEK_NAMES = Names(LLAMA, shared="shared_experts", choice_bias="gate.e_score_correction_bias")
_LATENT_NAMES = replace(_DEEPSEEK_NAMES, layer=_LATENT, predicts=True)
_ERNIE_EXPERTS: dict[str, JsonValue] = {"num_experts": 64, "top_k": 6, "expert_ffn_size": 1536, "shared_experts": 2}
_GLM_CHOICE: dict[str, JsonValue] = {"normalise_weights": True, "weight_scale": 1.0, "num_groups": 1, "top_groups": 1}
_EVERY_LAYER_HAS_EXPERTS = (Only("decoder_sparse_step", (1,)), Only("mlp_only_layers", ([],)))

FAMILIES: dict[str, HubType] = {
    "llama": HubType("LlamaForCausalLM", (*_LLAMA, _biased("attention_bias"), _MLP_BIAS, Rotation())),
    "mistral": HubType("MistralForCausalLM", (*_LLAMA, LayerWindows(), Rotation())),
    "qwen2": HubType(
        "Qwen2ForCausalLM",
        (*_LLAMA, Always({"attention_bias": "qkv"}), Only("use_sliding_window", (False,)), Rotation()),
    ),
    "qwen3": HubType(
        "Qwen3ForCausalLM",
        (*_LLAMA, _QK_NORM, _biased("attention_bias"), Only("use_sliding_window", (False,)), Rotation()),
    ),
    "ministral": HubType("MinistralForCausalLM", (*_LLAMA, LayerWindows(every=0), Rotation())),
    "gemma": HubType(
        "GemmaForCausalLM",
        (*_GEMMA, ValueMap("activation", "hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"), Rotation()),
    ),
    "gemma2": HubType(
        "Gemma2ForCausalLM", (*_GEMMA2_RULES, *_softcaps(50.0, 30.0), LayerWindows(every=2), Rotation()), Names(_GEMMA2)
    ),
    "gemma3_text": HubType(
        "Gemma3ForCausalLM",
        (
            *_GEMMA2_RULES,
            *_softcaps(None, None),
            _QK_NORM,
            LayerWindows(every=6),
            Rotation(local=True, theta=1_000_000.0),
        ),
        Names(_GEMMA2),
    ),
    "phi3": HubType(
        "Phi3ForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _DERIVED_HEAD_DIM, _FFN, _UNQUANTISED, _tied(False), _eps("rms_norm_eps", 1e-5)),
            *(_activation(), LayerWindows(), Rotation(fraction=1.0)),
        ),
        Names(LLAMA, fused=_phi3),
    ),
    "olmo2": HubType(
        "Olmo2ForCausalLM",
        (*_llama(eps=1e-5), _biased("attention_bias"), _QK_NORM_OVER_ALL, Always({"norm_places": "after"}), Rotation()),
        Names(LLAMA | _OUTPUT_NORMS),
    ),
    "olmo3": HubType(
        "Olmo3ForCausalLM",
        (
            *(*_llama(eps=1e-5), _biased("attention_bias"), _QK_NORM_OVER_ALL, Always({"norm_places": "after"})),
            *(LayerWindows(every=4), Rotation(scaled_windows=False, theta=500_000.0)),
        ),
        Names(LLAMA | _OUTPUT_NORMS),
    ),
    "granite": HubType("GraniteForCausalLM", (*_LLAMA, *_GRANITE, _biased("attention_bias"), _MLP_BIAS, Rotation())),
    "glm": HubType("GlmForCausalLM", _GLM, Names(LLAMA, fused=_gate_up)),
    "glm4": HubType(
        "Glm4ForCausalLM",
        (*_GLM, Always({"norm_places": "both"})),
        Names(
            LLAMA | {"attention_out_norm": "post_self_attn_layernorm", "ffn_out_norm": "post_mlp_layernorm"},
            fused=_gate_up,
        ),
    ),
    "smollm3": HubType(
        "SmolLM3ForCausalLM",
        (
            *_llama(tied=True),
            _biased("attention_bias"),
            _MLP_BIAS,
            Only("use_sliding_window", (False,)),
            Unrotated(),
            Rotation(theta=2_000_000.0),
        ),
    ),
    "starcoder2": HubType(
        "Starcoder2ForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _DERIVED_HEAD_DIM, _FFN, _UNQUANTISED, _tied(True), _eps("norm_epsilon", 1e-5)),
            *(_activation(default="gelu_pytorch_tanh"), _LAYER_NORM, _NOT_GATED),
            *(_biased("use_bias", default=True), Key("mlp_bias", "use_bias", bool, True), LayerWindows(), Rotation()),
        ),
        Names(LLAMA | {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}),
    ),
    "stablelm": HubType(
        "StableLmForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _DERIVED_HEAD_DIM, _FFN, _UNQUANTISED, _tied(False), _eps("layer_norm_eps", 1e-5)),
            *(_activation(), _LAYER_NORM, _biased("use_qkv_bias", ("none", "qkv")), Only("qk_layernorm", (False,))),
            ValueMap("parallel_residual", "use_parallel_residual", {False: "none", True: "one_norm"}, False),
            Rotation(fraction=0.25),
        ),
    ),
    "gpt2": HubType(
        "GPT2LMHeadModel",
        (
            *_sizes(num_hidden_layers="n_layer", hidden_size="n_embd", num_attention_heads="n_head"),
            *(Always({"num_kv_heads": lambda model: model["num_heads"]}), _DERIVED_HEAD_DIM),
            Key("ffn_size", "n_inner", int, lambda model: 4 * model["hidden_size"]),
            Key("learned_positions", "n_positions", int, 1024),
            *(_UNQUANTISED, _tied(True), _eps("layer_norm_epsilon", 1e-5)),
            *(_activation("activation_function", "gelu_new"), _LAYER_NORM, _NOT_GATED),
            Always({"attention_bias": "all", "mlp_bias": True}),
            *(Only("scale_attn_by_inverse_layer_idx", (False,)), Only("scale_attn_weights", (True,))),
            *(Only("reorder_and_upcast_attn", (False,)), Only("add_cross_attention", (False,))),
        ),
        Names(
            _GPT2,
            embed="transformer.wte",
            norm="transformer.ln_f",
            layers="transformer.h",
            positions="transformer.wpe",
            fused=_joined_qkv("attn.c_attn"),
            transposed=True,
            prefix="transformer.",
        ),
    ),
    "gpt_neox": HubType(
        "GPTNeoXForCausalLM",
        (
            *(*_sizes(), Always({"num_kv_heads": lambda model: model["num_heads"]}), _DERIVED_HEAD_DIM, _FFN),
            *(_UNQUANTISED, _tied(False), _eps("layer_norm_eps", 1e-5), _activation(default="gelu")),
            *(_LAYER_NORM, _NOT_GATED, _biased("attention_bias", default=True), Always({"mlp_bias": True})),
            ValueMap("parallel_residual", "use_parallel_residual", {True: "two_norms", False: "none"}, True),
            Rotation(fraction=0.25, fraction_key="rotary_pct", theta_key="rotary_emb_base"),
        ),
        Names(
            _GPT_NEOX,
            embed="gpt_neox.embed_in",
            norm="gpt_neox.final_layer_norm",
            head="embed_out",
            layers="gpt_neox.layers",
            fused=_grouped_qkv("attention.query_key_value"),
        ),
    ),
    "falcon": HubType(
        "FalconForCausalLM",
        (
            *(
                *_sizes(),
                _DERIVED_HEAD_DIM,
                Key("ffn_size", "ffn_hidden_size", int, lambda model: 4 * model["hidden_size"]),
            ),
            *(_UNQUANTISED, _tied(True), _eps("layer_norm_epsilon", 1e-5), _activation("activation", "gelu")),
            *(_LAYER_NORM, _NOT_GATED, Only("alibi", (False,)), Falcon(), Rotation()),
        ),
        Names(
            _FALCON,
            embed="transformer.word_embeddings",
            norm="transformer.ln_f",
            layers="transformer.h",
            fused=_grouped_qkv("self_attention.query_key_value"),
            two_norms={"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"},
        ),
    ),
    "cohere": HubType(
        "CohereForCausalLM", (*_COHERE, _DERIVED_HEAD_DIM, Only("use_qk_norm", (False,)), Rotation(theta=500_000.0))
    ),
    "cohere2": HubType(
        "Cohere2ForCausalLM",
        (*_COHERE, _HEAD_DIM, LayerWindows(every=4), Always({"rotated_layers": "windowed"}), Rotation()),
    ),
    "nemotron": HubType(
        "NemotronForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _HEAD_DIM, _FFN, _UNQUANTISED, _tied(False), _eps("norm_eps", 1e-5)),
            *(_activation(default="relu2"), _LAYER_NORM, Always({"norm_offset": True}), _NOT_GATED),
            *(_biased("attention_bias"), _MLP_BIAS, Rotation(fraction=0.5)),
        ),
    ),
    "exaone4": HubType(
        "Exaone4ForCausalLM",
        (
            *(*_llama(eps=1e-5), _QK_NORM, Always({"norm_places": "after"}), LayerWindows(every=4)),
            Always({"rotated_layers": lambda model: "all" if model["sliding_window"] is None else "windowed"}),
            Rotation(),
        ),
        Names(LLAMA | _OUTPUT_NORMS),
    ),
    "ernie4_5": HubType(
        "Ernie4_5ForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, Key("head_dim", "head_dim", int, 128), _FFN, _UNQUANTISED, _tied(True)),
            *(_eps("rms_norm_eps", 1e-5), _activation(), _biased("use_bias"), Key("mlp_bias", "use_bias", bool, False)),
            *(Always({"rotary_pairs": "neighbours"}), Rotation(theta=500_000.0)),
        ),
    ),
    "seed_oss": HubType(
        "SeedOssForCausalLM",
        (
            *(*_LLAMA, _biased("attention_bias", ("none", "qkv"), default=True), Only("attention_out_bias", (False,))),
            *(_MLP_BIAS, Rotation()),
        ),
    ),
    "arcee": HubType(
        "ArceeForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _HEAD_DIM, _FFN, _UNQUANTISED, _tied(False), _eps("rms_norm_eps", 1e-5)),
            *(_activation(default="relu2"), _NOT_GATED, _biased("attention_bias"), _MLP_BIAS, Rotation()),
        ),
    ),
    "mixtral": HubType(
        "MixtralForCausalLM",
        (
            *(*_llama(eps=1e-5), LayerWindows(), Rotation(theta=1_000_000.0)),
            ExpertKeys(
                {
                    "num_experts": "num_local_experts",
                    "top_k": "num_experts_per_tok",
                    "expert_ffn_size": "intermediate_size",
                },
                {"normalise_weights": True},
            ),
        ),
        Names(LLAMA, moe="block_sparse_moe", experts=("w1", "w3", "w2")),
    ),
    "qwen3_moe": HubType(
        "Qwen3MoeForCausalLM",
        (
            *(*_LLAMA, _QK_NORM, _biased("attention_bias"), Only("use_sliding_window", (False,))),
            *(*_EVERY_LAYER_HAS_EXPERTS, ExpertKeys(_QWEN_EXPERTS), Rotation()),
        ),
    ),
    "qwen2_moe": HubType(
        "Qwen2MoeForCausalLM",
        (
            *(*_LLAMA, ValueMap("attention_bias", "qkv_bias", {True: "qkv", False: "none"}, True)),
            *(Only("use_sliding_window", (False,)), *_EVERY_LAYER_HAS_EXPERTS, Rotation()),
            ExpertKeys(
                _QWEN_EXPERTS | {"shared_expert_ffn_size": "shared_expert_intermediate_size"}, {"shared_gate": True}
            ),
        ),
    ),
    "olmoe": HubType(
        "OlmoeForCausalLM",
        (
            *(*_llama(eps=1e-5), _QK_NORM_OVER_ALL, _biased("attention_bias"), Only("clip_qkv", (None,)), Rotation()),
            ExpertKeys(_QWEN_EXPERTS | {"expert_ffn_size": "intermediate_size"}),
        ),
    ),
    "granitemoe": HubType(
        "GraniteMoeForCausalLM",
        (
            *(*_LLAMA, *_GRANITE, _biased("attention_bias"), Rotation()),
            ExpertKeys(
                {
                    "num_experts": "num_local_experts",
                    "top_k": "num_experts_per_tok",
                    "expert_ffn_size": "intermediate_size",
                },
                {"normalise_weights": True},
            ),
        ),
        Names(
            LLAMA,
            moe="block_sparse_moe",
            router="router.layer",
            experts=("input_linear.weight", "output_linear.weight"),
        ),
    ),
    "gpt_oss": HubType(
        "GptOssForCausalLM",
        (
            *(*_sizes(), Key("num_kv_heads", "num_key_value_heads", int, 8), Key("head_dim", "head_dim", int, 64)),
            *(_FFN, PackedExperts(), _tied(False), _eps("rms_norm_eps", 1e-5), _activation()),
            *(_biased("attention_bias", default=True), Always({"attention_sinks": True})),
            *(LayerWindows(every=2, window=128), Rotation(theta=150_000.0, scaling=_GPT_OSS_YARN)),
            *(Key("gate_limit", "swiglu_limit", float, 7.0), Only("swiglu_alpha", (1.702,))),
            ExpertKeys(
                {
                    "num_experts": "num_local_experts",
                    "top_k": "num_experts_per_tok",
                    "expert_ffn_size": "intermediate_size",
                },
                {"normalise_weights": True, "bias": True},
            ),
        ),
        Names(LLAMA, router="router", experts=("experts.gate_up_proj", "experts.down_proj"), alternating=True),
    ),
    "deepseek_v3": HubType(
        "DeepseekV3ForCausalLM",
        (
            *(*_DEEPSEEK, _eps(), LatentKeys(), _INTERLEAVE),
            *(Only("scoring_func", ("sigmoid",)), Only("topk_method", ("noaux_tc",))),
            PredictionLayers(),
            _deepseek_experts(
                {"num_experts": 256, "top_k": 8, "expert_ffn_size": 2048, "shared_experts": 1, "first_dense_layers": 3},
                {"normalise_weights": True, "weight_scale": 2.5, "num_groups": 8, "top_groups": 4},
            ),
        ),
        _LATENT_NAMES,
    ),
    "deepseek_v2": HubType(
        "DeepseekV2ForCausalLM",
        (
            *(*_DEEPSEEK, _eps(), LatentKeys(), Always({"rotary_pairs": "neighbours"}), Only("mlp_bias", (False,))),
            *(Only("scoring_func", ("softmax",)), Only("norm_topk_prob", (False,))),
            ExpertKeys(
                {name: key for name, key in _DEEPSEEK_EXPERTS.items() if name != "normalise_weights"},
                {"normalise_weights": False, "group_best": 1},
                {"num_experts": 64, "expert_ffn_size": 1407, "shared_experts": 2},
            ),
            GroupChoice(),
        ),
        Names(_LATENT, shared="shared_experts"),
    ),
    "glm4_moe": HubType(
        "Glm4MoeForCausalLM",
        (
            *(*_llama(eps=1e-5), _biased("attention_bias", ("none", "qkv"))),
            *(Key("qk_norm", "use_qk_norm", bool, False), Rotation(fraction=0.5)),
            PredictionLayers(),
            _deepseek_experts(
                {"num_experts": 128, "top_k": 8, "expert_ffn_size": 1408, "shared_experts": 1, "first_dense_layers": 1},
                _GLM_CHOICE,
            ),
        ),
        replace(_DEEPSEEK_NAMES, predicts=True),
    ),
    "glm4_moe_lite": HubType(
        "Glm4MoeLiteForCausalLM",
        (
            *(*_DEEPSEEK, _eps("rms_norm_eps", 1e-5), LatentKeys(query=768, plain=192, value=256), _INTERLEAVE),
            PredictionLayers(),
            _deepseek_experts(
                {"num_experts": 64, "top_k": 4, "expert_ffn_size": 1536, "shared_experts": 1},
                {**_GLM_CHOICE, "weight_scale": 1.8},
                _WITHOUT_FIRST,
            ),
            DenseFirst(),
        ),
        _LATENT_NAMES,
    ),
    "solar_open": HubType(
        "SolarOpenForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, Key("head_dim", "head_dim", int, 128), _UNQUANTISED, _tied(False)),
            *(_eps("rms_norm_eps", 1e-5), _activation(), _biased("attention_bias", ("none", "qkv"))),
            *(Always({"ffn_size": lambda model: model["hidden_size"]}), Rotation(fraction=1.0, theta=1_000_000.0)),
            _deepseek_experts(
                {"num_experts": 128, "top_k": 8, "expert_ffn_size": 1280, "shared_experts": 1},
                _GLM_CHOICE,
                _WITHOUT_FIRST,
            ),
        ),
        _DEEPSEEK_NAMES,
    ),
    "dots1": HubType(
        "Dots1ForCausalLM",
        (
            *(*_LLAMA, _QK_NORM, _biased("attention_bias"), FullLayers(), Rotation()),
            ExpertKeys(_DEEPSEEK_EXPERTS, _CHOICE_BY_SIGMOID),
        ),
        _DEEPSEEK_NAMES,
    ),
    "exaone_moe": HubType(
        "ExaoneMoeForCausalLM",
        (
            *(*_llama(eps=1e-5), _QK_NORM, LayerWindows(every=4)),
            Always({"rotated_layers": lambda model: "all" if model["sliding_window"] is None else "windowed"}),
            Rotation(),
            _deepseek_experts(
                {"num_experts": 64, "top_k": 8, "expert_ffn_size": 1024, "shared_experts": 1},
                {**_GLM_CHOICE, "weight_scale": 2.5},
                _WITHOUT_FIRST | {"num_experts": "num_experts", "shared_experts": "num_shared_experts"},
            ),
            DenseFirst(),
        ),
        Names(LLAMA, shared="shared_experts", choice_bias="e_score_correction_bias"),
    ),
    "hy_v3": HubType(
        "HYV3ForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, Key("head_dim", "head_dim", int, 128), _FFN, _UNQUANTISED, _tied(False)),
            *(_eps("rms_norm_eps", 1e-5), _activation(), _QK_NORM, _biased("attention_bias")),
            *(Only("mlp_bias", (False,)), Rotation(theta=11_158_840.0)),
            _deepseek_experts(
                {"num_experts": 192, "top_k": 8, "expert_ffn_size": 1536, "shared_experts": 1},
                {"weight_scale": 2.826},
                {
                    "num_experts": "num_experts",
                    "top_k": "num_experts_per_tok",
                    "expert_ffn_size": "moe_intermediate_size",
                    "shared_experts": "num_shared_experts",
                    "weight_scale": "router_scaling_factor",
                },
            ),
            DenseFirst(),
        ),
        Names(LLAMA, router="router.gate", shared="shared_mlp", choice_bias="expert_bias"),
    ),
    "minimax_m2": HubType(
        "MiniMaxM2ForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, Key("head_dim", "head_dim", int, 128), _FFN, _UNQUANTISED, _tied(False), _eps()),
            *(_activation(), _QK_NORM_OVER_ALL, Rotation(fraction=1.0, theta=5_000_000.0), RotaryDim()),
            _deepseek_experts(
                {"num_experts": 256, "top_k": 8},
                {},
                {
                    "num_experts": "num_local_experts",
                    "top_k": "num_experts_per_tok",
                    "expert_ffn_size": "intermediate_size",
                },
            ),
        ),
        Names(LLAMA, moe="block_sparse_moe", experts=("w1", "w3", "w2"), choice_bias="e_score_correction_bias"),
    ),
    "ernie4_5_moe": HubType(
        "Ernie4_5_MoeForCausalLM",
        (
            *(*_sizes(), _KV_HEADS, _HEAD_DIM, _FFN, _UNQUANTISED, _tied(True), _eps("rms_norm_eps", 1e-5)),
            *(_activation(), Only("use_bias", (False,)), Always({"rotary_pairs": "neighbours"})),
            Rotation(theta=500_000.0),
            ExpertKeys(
                {
                    "num_experts": "moe_num_experts",
                    "top_k": "moe_k",
                    "expert_ffn_size": "moe_intermediate_size",
                    "shared_experts": "moe_num_shared_experts",
                    "first_dense_layers": "moe_layer_start_index",
                    "every": "moe_layer_interval",
                },
                {"normalise_weights": True, "choice_bias": True},
                {**_ERNIE_EXPERTS, "first_dense_layers": 1, "every": 1},
            ),
            ErnieLayers(),
        ),
        Names(
            LLAMA,
            shared="shared_experts",
            choice_bias="moe_statics.e_score_correction_bias",
            choice_bias_leading=(1,),
        ),
    ),
}

LEFT_OUT = {
    "minimax": "its lightning attention is linear attention with a decay for each head, which no layer here computes",
    "qwen3_next": "most of its layers mix tokens by the gated delta rule, which no layer here computes",
    "granitemoeshared": "its shared expert is one tensor outside of the experts' module, which no rule names",
    "phimoe": "its router chooses two experts in turn and masks scores between them (SparseMixer)",
    "hunyuan_v1_moe": "its queries and keys are normalised after their rotation",
    "afmoe": "its attention has a gate for each output",
    "longcat_flash": "its layers have two attentions and experts that compute nothing",
    "llama4": "its router scales the inputs of experts instead of their outputs",
    "jetmoe": "its attention is a mixture of experts too",
}
"""Decoders with experts in transformers that are not read -> the reason."""
