"""Convert config.json to the engine's decoder and back. Keys without a counterpart are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.reading.json_file import Kind, describe_kind, is_kind, show_kind
from trainspec_cli.spec.recipe.model import DecoderModel, ModelSpec
from trainspec_cli.spec.recipe.model_parts import RopeScaling

Config = Mapping[str, Any]

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

_EXPECTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}
"""Keys that may change the architecture, with the values that do not."""


_KINDS: dict[str, Kind] = {
    "num_hidden_layers": int,
    "hidden_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int | None,
    "head_dim": int | None,
    "intermediate_size": int,
    "vocab_size": int,
    "max_position_embeddings": int | None,
    "sliding_window": int | None,
    "num_local_experts": int | None,
    "num_experts": int | None,
    "num_experts_per_tok": int,
    "moe_intermediate_size": int,
    "rms_norm_eps": float,
    "rope_theta": float | None,
    "rope_parameters": dict | None,
    "rope_scaling": dict | None,
    "tie_word_embeddings": bool | None,
    "attention_bias": bool | None,
    "norm_topk_prob": bool | None,
}
_ROPE_KINDS: dict[str, Kind] = {
    "rope_theta": float | None,
    "rope_type": str | None,
    "type": str | None,
    "factor": float,
    "original_max_position_embeddings": int | None,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "beta_fast": float | None,
    "beta_slow": float | None,
    "truncate": bool | None,
}


# Reading


def read_model(config: Config, where: str) -> dict[str, Any]:
    """Return the `model` section that config.json describes. Raises RecipeError; `where` names the file."""
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise _unsupported(f"{where} has model_type {kind!r}; supported are {', '.join(MODEL_TYPES)}")
    for key, allowed in _EXPECTED.items():
        if config.get(key) not in allowed:
            raise _unsupported(f"{where} has {key} {config[key]!r}, which the engine's models do not")
    _check_kinds(config, _KINDS, where)
    _check_kinds(_rope(config), _ROPE_KINDS, where)
    try:
        return _sizes(config) | _attention(config, kind) | _rotation(config, where) | _experts(config, kind)
    except KeyError as error:
        raise _unsupported(f"{where} has no {error}") from error


def _check_kinds(fields: Config, kinds: Mapping[str, Kind], where: str) -> None:
    """Raise RecipeError with every key whose kind transformers would not write, and every number below 0."""
    wrong, hint = [], "name a folder that transformers has written"
    for key, kind in kinds.items():
        if key in fields and not _fits(fields[key], kind):
            message = f"{where} has {show_kind(fields[key])} as `{key}`; {describe_kind(kind)} is needed, not below 0"
            wrong.append(Problem("wrong_type", message, "init.from", hint, file=where))
    if wrong:
        raise RecipeError(wrong)


def _fits(value: Any, kind: Kind) -> bool:
    if not is_kind(value, kind):
        return False
    return not isinstance(value, (int, float)) or 0 <= value < math.inf


def _sizes(config: Config) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    name = config.get("_name_or_path")
    return {
        "family": "decoder",
        "name": name if name and isinstance(name, str) else config["model_type"],
        "num_layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // max(heads, 1),
        "ffn_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "norm_eps": config.get("rms_norm_eps", 1e-6),
    }


def _attention(config: Config, kind: str) -> dict[str, Any]:
    bias = "qkv" if kind == "qwen2" else "all" if config.get("attention_bias") else "none"
    window = config.get("sliding_window") if kind in ("mistral", "mixtral") else None
    return {
        "attention_bias": bias,
        "qk_norm": kind.startswith("qwen3"),
        "sliding_window": window,
        "global_attention_every": 1 if window is None else 0,
    }


def _rotation(config: Config, where: str) -> dict[str, Any]:
    """Read rotary positions: `rope_parameters` since transformers 5, before that `rope_theta` and `rope_scaling`."""
    rope = _rope(config)
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise _unsupported(f"{where} scales its rotary positions by {kind!r}; supported are {known}")
    return {"rope_theta": float(theta), "rope_scaling": _SCALINGS[kind](rope, config)}


def _rope(config: Config) -> Config:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _read_llama3(rope: Config, config: Config) -> dict[str, Any]:
    return {
        "kind": "llama3",
        "factor": rope["factor"],
        "original_seq_len": rope["original_max_position_embeddings"],
        "low_freq_factor": rope["low_freq_factor"],
        "high_freq_factor": rope["high_freq_factor"],
    }


def _read_yarn(rope: Config, config: Config) -> dict[str, Any]:
    return {
        "kind": "yarn",
        "factor": rope["factor"],
        "original_seq_len": rope.get("original_max_position_embeddings") or config["max_position_embeddings"],
        "beta_fast": rope.get("beta_fast") or 32.0,
        "beta_slow": rope.get("beta_slow") or 1.0,
        "whole_bounds": rope.get("truncate", True),
    }


_SCALINGS: dict[str, Callable[[Config, Config], dict[str, Any] | None]] = {
    "default": lambda rope, config: None,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def _experts(config: Config, kind: str) -> dict[str, Any]:
    if kind not in ("mixtral", "qwen3_moe"):
        return {"experts": None}
    is_qwen = kind == "qwen3_moe"
    experts = {
        "num_experts": config.get("num_local_experts") or config["num_experts"],
        "top_k": config["num_experts_per_tok"],
        "expert_ffn_size": config["moe_intermediate_size"] if is_qwen else config["intermediate_size"],
        "normalise_weights": bool(config.get("norm_topk_prob", False)) if is_qwen else True,
    }
    return {"experts": experts}


# Writing


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
    plain = DecoderModel(1, 1, 1, 1, 1, 1, 1)
    keys = ["gated_mlp", "learned_positions", "mla", "activation", "gate_limit", "attention_sinks"]
    biased, windowed, moe = model.attention_bias != "none", model.sliding_window is not None, model.experts is not None
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


def _misfit(key: str, value: Any) -> Problem:
    message = f"`model.{key}` is {value}, which none of the types {', '.join(MODEL_TYPES)} supports"
    return Problem("unsupported", message, f"model.{key}", "such a model cannot be exported to Hugging Face's format")


def write_config(model: DecoderModel, seq_len: int, dtype: str) -> dict[str, Any]:
    """Return the content of config.json, with keys that transformers 4 and 5 both read; `dtype` as torch names it."""
    kind = model_type(model)
    config: dict[str, Any] = {
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


def _write_special(model: DecoderModel, kind: str) -> dict[str, Any]:
    """Return the keys whose defaults for the type would be wrong."""
    special: dict[str, Any] = {}
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


def _write_scaling(scaling: RopeScaling) -> dict[str, Any]:
    fields = {
        "rope_type": scaling.kind,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_seq_len,
    }
    if scaling.kind == "llama3":
        return fields | {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    return fields | {
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.whole_bounds,
    }


def _unsupported(message: str) -> RecipeError:
    return RecipeError(Problem("unsupported", message, "init.from", "name another folder"))


def differences(asked: DecoderModel, found: DecoderModel) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which two models compute different functions, with both values (asked, found).

    Keys that only steer training, and keys that are not used, may differ.
    """
    mine, theirs = _comparable(asked), _comparable(found)
    return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


_FREE = ("name", "prediction_layers", "experts.balance_rate", "experts.balance_loss", "experts.capacity_factor")


def _comparable(model: DecoderModel) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in asdict(model).items():
        flat |= {f"{key}.{inner}": kept for inner, kept in value.items()} if isinstance(value, dict) else {key: value}
    if model.experts is not None and all(model.is_expert_layer(layer) for layer in range(model.num_layers)):
        del flat["ffn_size"]
    if model.sliding_window is None:
        del flat["global_attention_every"]
    return {key: value for key, value in flat.items() if key not in _FREE and value is not None}
