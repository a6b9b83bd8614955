"""Write config.json for the engine's decoder. Keys without a counterpart are refused by name."""

from __future__ import annotations

from dataclasses import asdict
from typing import TypeVar

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec, RopeScaling

T = TypeVar("T")

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MODEL_TYPES = tuple(_ARCHITECTURES)
"""Types of which the engine's decoder can hold every tensor."""


def model_type(model: ModelSpec) -> str:
    """Return Hugging Face's type of `model`. Raises RecipeError with every key that none of the types supports."""
    problems = list(_misfits(model))
    if problems or not isinstance(model, DecoderModel):
        raise RecipeError(problems)
    if model.experts is not None:
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm:
        return "qwen3"
    if model.attention_bias == "qkv":
        return "qwen2"
    return "llama" if model.sliding_window is None else "mistral"


def _misfits(model: ModelSpec) -> list[Problem]:
    if not isinstance(model, DecoderModel):
        return [_misfit("family", model.family)]
    # Any sizes do: only the defaults of its other keys are compared.
    plain = DecoderModel(1, 1, 1, 1, 1, 1, 1)
    keys = ["gated_mlp", "learned_positions", "mla", "activation", "gate_limit", "attention_sinks"]
    biased = model.attention_bias != "none"
    windowed = model.sliding_window is not None
    moe = model.experts is not None
    if biased and (windowed or model.qk_norm or moe):
        keys.append("attention_bias")
    if windowed and (model.qk_norm or model.global_attention_every):
        keys.append("sliding_window")
    wrong = [_misfit(key, getattr(model, key)) for key in keys if getattr(model, key) != getattr(plain, key)]
    return wrong + _misfit_experts(model)


def _misfit_experts(model: DecoderModel) -> list[Problem]:
    experts = model.experts
    if experts is None:
        return []
    allowed = {
        "shared_experts": 0,
        "first_dense_layers": 0,
        "every": 1,
        "bias": False,
        "score": "softmax",
        "weight_scale": 1.0,
        "balance_rate": 0.0,
    }
    wrong = [key for key, value in allowed.items() if getattr(experts, key) != value]
    wrong += ["num_groups"] if experts.top_groups < experts.num_groups else []
    wrong += [] if model.qk_norm or experts.normalise_weights else ["normalise_weights"]
    return [_misfit(f"experts.{key}", getattr(experts, key)) for key in wrong]


def _misfit(key: str, value: object) -> Problem:
    message = f"`model.{key}` is {value}, which none of the types {', '.join(MODEL_TYPES)} supports"
    hint = "it cannot be exported; from Python, trainspec_cli.read_weights(RUN) and load_model(RUN) read every model"
    return Problem("unsupported", message, f"model.{key}", hint)


def write_config(model: DecoderModel, seq_len: int, dtype: str) -> JsonObject:
    """Return the content of config.json, with keys that transformers 4 and 5 both read; `dtype` as torch names it."""
    kind = model_type(model)
    config: JsonObject = {
        "architectures": [_ARCHITECTURES[kind]],
        "model_type": kind,
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_size,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": seq_len,
        "rope_theta": model.rope_theta,
        "rope_scaling": None if model.rope_scaling is None else _write_scaling(model.rope_scaling),
        "torch_dtype": dtype,
        "use_cache": True,
    }
    return config | _write_special(model, kind)


def _write_special(model: DecoderModel, kind: str) -> JsonObject:
    """Return the keys whose defaults for the type would be wrong."""
    special: JsonObject = {}
    if kind in ("mistral", "mixtral"):
        special["sliding_window"] = model.sliding_window
    if kind in ("llama", "qwen3", "qwen3_moe"):
        special["attention_bias"] = model.attention_bias == "all"
    if model.experts is not None:
        experts = model.experts
        special |= {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
        if kind == "mixtral":
            special["intermediate_size"] = experts.expert_ffn_size
        else:
            special |= {
                "num_experts": experts.num_experts,
                "moe_intermediate_size": experts.expert_ffn_size,
                "norm_topk_prob": experts.normalise_weights,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
    return special


def _write_scaling(scaling: RopeScaling) -> JsonObject:
    written: JsonObject = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
    if scaling.kind == "llama3":
        return written | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return written | {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.whole_bounds}


def differences(asked: DecoderModel, found: DecoderModel) -> dict[str, tuple[object, object]]:
    """Return the keys in which two models compute different functions, with both values (asked, found).

    Keys that only steer training, and keys that are not used, may differ.
    """
    mine = _comparable(asked)
    theirs = _comparable(found)
    return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


_FREE = ("name", "prediction_layers", "experts.balance_rate", "experts.balance_loss", "experts.capacity_factor")


def _comparable(model: DecoderModel) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in asdict(model).items():
        flat |= {f"{key}.{inner}": kept for inner, kept in value.items()} if isinstance(value, dict) else {key: value}
    if model.experts is not None and all(model.is_expert_layer(layer) for layer in range(model.num_layers)):
        # No layer has the dense feed-forward, so its width computes nothing.
        del flat["ffn_size"]
    if model.sliding_window is None:
        del flat["global_attention_every"]
    return {key: value for key, value in flat.items() if key not in _FREE and value is not None}
