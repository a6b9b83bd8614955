"""Read the engine's decoder from config.json. Keys without a counterpart are refused by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar, get_type_hints

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import Kind, describe_kind, is_kind, show_kind
from trainspec_cli.data.huggingface.config import MODEL_TYPES
from trainspec_cli.recipe.structure import is_required

T = TypeVar("T")

_EXPECTED: dict[str, tuple[JsonValue, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}
"""Keys that may change the architecture, with the values that do not."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The keys of config.json that decide a decoder's shape. One without a default is needed by every type."""

    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int | None = None
    sliding_window: int | None = None
    num_local_experts: int | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float | None = None
    rope_parameters: dict[str, JsonValue] | None = None
    rope_scaling: dict[str, JsonValue] | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    norm_topk_prob: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """The keys of `rope_parameters` (since transformers 5) or `rope_scaling` that decide the rotary positions."""

    rope_theta: float | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool | None = True


def read_model(config: JsonObject, where: str) -> JsonObject:
    """Return the `model` section that config.json describes. Raises RecipeError; `where` names the file."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise _unsupported(f"{where} has model_type {kind!r}; supported are {', '.join(MODEL_TYPES)}")
    for key, allowed in _EXPECTED.items():
        if config.get(key) not in allowed:
            raise _unsupported(f"{where} has {key} {config[key]!r}, which the engine's models do not")
    read = _read_keys(DecoderConfig, config, where)
    rope = _read_keys(RopeConfig, read.rope_parameters or read.rope_scaling or {}, where)
    name = config.get("_name_or_path")
    named: JsonObject = {"family": "decoder", "name": name if name and isinstance(name, str) else kind}
    try:
        return named | _sizes(read) | _attention(read, kind) | _rotation(rope, read, where) | _experts(read, kind)
    except KeyError as error:
        raise _unsupported(f"{where} has no {error}") from error


def _read_keys(cls: type[T], given: JsonObject, where: str) -> T:
    """Return the keys of dataclass `cls`. Raises RecipeError with every key whose kind transformers would not write,
    and every number below 0; else with the first key that is missing."""
    kinds = get_type_hints(cls)
    wrong = []
    hint = "name a folder that transformers has written"
    for key, kind in kinds.items():
        if key in given and not _fits(given[key], kind):
            message = f"{where} has {show_kind(given[key])} as `{key}`; {describe_kind(kind)} is needed, not below 0"
            wrong.append(Problem("wrong_type", message, "init.from", hint, file=where))
    if wrong:
        raise RecipeError(wrong)
    missing = [field.name for field in fields(cls) if is_required(field) and field.name not in given]  # type: ignore[arg-type]
    if missing:
        raise _unsupported(f"{where} has no {missing[0]!r}")
    return cls(**{key: given[key] for key in kinds if key in given})


def _fits(value: JsonValue, kind: Kind) -> bool:
    if not is_kind(value, kind):
        return False
    return not isinstance(value, (int, float)) or 0 <= value < math.inf


def _needed(value: T | None, key: str) -> T:
    """Return the value of a key that only some types need. Raises KeyError where it is missing."""
    if value is None:
        raise KeyError(key)
    return value


def _sizes(config: DecoderConfig) -> JsonObject:
    heads = config.num_attention_heads
    hidden = config.hidden_size
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": config.num_key_value_heads or heads,
        "head_dim": config.head_dim or hidden // max(heads, 1),
        "ffn_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "tied_embeddings": bool(config.tie_word_embeddings),
        "norm_eps": config.rms_norm_eps,
    }


def _attention(config: DecoderConfig, kind: str) -> JsonObject:
    bias = "qkv" if kind == "qwen2" else "all" if config.attention_bias else "none"
    window = config.sliding_window if kind in ("mistral", "mixtral") else None
    return {
        "attention_bias": bias,
        "qk_norm": kind.startswith("qwen3"),
        "sliding_window": window,
        "global_attention_every": 1 if window is None else 0,
    }


def _rotation(rope: RopeConfig, config: DecoderConfig, where: str) -> JsonObject:
    theta = rope.rope_theta or config.rope_theta or 10_000.0
    kind = rope.rope_type or rope.type or "default"
    if kind not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise _unsupported(f"{where} scales its rotary positions by {kind!r}; supported are {known}")
    return {"rope_theta": float(theta), "rope_scaling": _SCALINGS[kind](rope, config)}


def _read_llama3(rope: RopeConfig, config: DecoderConfig) -> JsonObject:
    return {
        "kind": "llama3",
        "factor": _needed(rope.factor, "factor"),
        "original_seq_len": _needed(rope.original_max_position_embeddings, "original_max_position_embeddings"),
        "low_freq_factor": _needed(rope.low_freq_factor, "low_freq_factor"),
        "high_freq_factor": _needed(rope.high_freq_factor, "high_freq_factor"),
    }


def _read_yarn(rope: RopeConfig, config: DecoderConfig) -> JsonObject:
    original = rope.original_max_position_embeddings or config.max_position_embeddings
    return {
        "kind": "yarn",
        "factor": _needed(rope.factor, "factor"),
        "original_seq_len": _needed(original, "max_position_embeddings"),
        "beta_fast": rope.beta_fast or 32.0,
        "beta_slow": rope.beta_slow or 1.0,
        "whole_bounds": rope.truncate,
    }


_SCALINGS: dict[str, Callable[[RopeConfig, DecoderConfig], JsonObject | None]] = {
    "default": lambda rope, config: None,
    "llama3": _read_llama3,
    "yarn": _read_yarn,
}


def _experts(config: DecoderConfig, kind: str) -> JsonObject:
    if kind not in ("mixtral", "qwen3_moe"):
        return {"experts": None}
    is_qwen = kind == "qwen3_moe"
    width = _needed(config.moe_intermediate_size, "moe_intermediate_size") if is_qwen else config.intermediate_size
    experts: JsonObject = {
        "num_experts": config.num_local_experts or _needed(config.num_experts, "num_experts"),
        "top_k": _needed(config.num_experts_per_tok, "num_experts_per_tok"),
        "expert_ffn_size": width,
        "normalise_weights": bool(config.norm_topk_prob) if is_qwen else True,
    }
    return {"experts": experts}


def _unsupported(message: str) -> RecipeError:
    return RecipeError(Problem("unsupported", message, "init.from", "name another folder"))
