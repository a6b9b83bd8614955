"""Convert between config.json and the engine's decoder. Keys without a counterpart are rejected with an error that
names them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import TypeVar, get_type_hints

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import describe_kind, is_kind, show_kind
from trainspec_cli.recipe.keys.model import DecoderModel, ModelSpec
from trainspec_cli.recipe.records import is_required

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
"""Model types whose tensors the engine's decoder can represent completely."""


def model_type(model: ModelSpec) -> str:
    """Return Hugging Face's model type for `model`. Raises a RecipeError that lists all keys that none of the types
    supports."""
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
    # The sizes do not matter; only the defaults of the other keys are compared.
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
    if (experts := model.experts) is None:
        return wrong
    allowed = {
        "shared_experts": 0,
        "first_dense_layers": 0,
        "every": 1,
        "bias": False,
        "score": "softmax",
        "weight_scale": 1.0,
        "balance_rate": 0.0,
    }
    keys = [key for key, value in allowed.items() if getattr(experts, key) != value]
    keys += ["num_groups"] if experts.top_groups < experts.num_groups else []
    keys += [] if model.qk_norm or experts.normalise_weights else ["normalise_weights"]
    return wrong + [_misfit(f"experts.{key}", getattr(experts, key)) for key in keys]


def _misfit(key: str, value: object) -> Problem:
    message = f"`model.{key}` is {value}, which no model type supports ({', '.join(MODEL_TYPES)})"
    hint = "it cannot be exported; from Python, trainspec_cli.read_weights(RUN) and load_model(RUN) read every model"
    return Problem("unsupported", message, f"model.{key}", hint)


def write_config(model: DecoderModel, seq_len: int, dtype: str) -> JsonObject:
    """Return the content of config.json, with keys that both transformers 4 and 5 can read. `dtype` is torch's name."""
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
        "rope_scaling": None,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if (scaling := model.rope_scaling) is not None:
        written: JsonObject = {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_seq_len,
        }
        if scaling.kind == "llama3":
            written |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
        else:
            written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
            written["truncate"] = scaling.whole_bounds
        config["rope_scaling"] = written
    # Add the keys whose default for this type would be wrong.
    if kind in ("mistral", "mixtral"):
        config["sliding_window"] = model.sliding_window
    if kind in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = model.attention_bias == "all"
    if (experts := model.experts) is not None:
        config |= {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.top_k}
        if kind == "mixtral":
            config["intermediate_size"] = experts.expert_ffn_size
        else:
            config |= {
                "num_experts": experts.num_experts,
                "moe_intermediate_size": experts.expert_ffn_size,
                "norm_topk_prob": experts.normalise_weights,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
    return config


def differences(asked: DecoderModel, found: DecoderModel) -> dict[str, tuple[object, object]]:
    """Return the keys whose values make two models compute different functions, each with its values (asked, found).

    Keys that affect only training, and unused keys, may differ."""
    mine = _comparable(asked)
    theirs = _comparable(found)
    return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


_FREE = ("name", "prediction_layers", "experts.balance_rate", "experts.balance_loss", "experts.capacity_factor")


def _comparable(model: DecoderModel) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in asdict(model).items():
        flat |= {f"{key}.{inner}": kept for inner, kept in value.items()} if isinstance(value, dict) else {key: value}
    if model.experts is not None and all(model.is_expert_layer(layer) for layer in range(model.num_layers)):
        # No layer has a dense feed-forward network, so its width has no effect.
        del flat["ffn_size"]
    if model.sliding_window is None:
        del flat["global_attention_every"]
    return {key: value for key, value in flat.items() if key not in _FREE and value is not None}


# Read a config.json


_EXPECTED: dict[str, tuple[JsonValue, ...]] = {
    "hidden_act": ("silu", None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1, None),
    "mlp_only_layers": ([], None),
    "quantization_config": (None,),
}
"""Keys that may change the architecture, each with the values that leave it unchanged."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The keys of config.json that determine the shape of a decoder. Every model type needs the keys without a
    default."""

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
    """The keys of `rope_parameters` (since transformers 5) or `rope_scaling` that determine the rotary embeddings."""

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
            raise _unsupported(f"{where} has {key} {config[key]!r}, which the engine's models do not support")
    read = _read_keys(DecoderConfig, config, where)
    rope = _read_keys(RopeConfig, read.rope_parameters or read.rope_scaling or {}, where)
    name = config.get("_name_or_path")
    heads = read.num_attention_heads
    window = read.sliding_window if kind in ("mistral", "mixtral") else None
    scaling: JsonObject | None = None
    experts: JsonObject | None = None
    scaled_by = rope.rope_type or rope.type or "default"
    if scaled_by not in ("default", "llama3", "yarn"):
        raise _unsupported(f"{where} scales rotary embeddings by {scaled_by!r}; supported are default, llama3, yarn")
    try:
        if scaled_by == "llama3":
            scaling = {
                "kind": "llama3",
                "factor": _needed(rope.factor, "factor"),
                "original_seq_len": _needed(rope.original_max_position_embeddings, "original_max_position_embeddings"),
                "low_freq_factor": _needed(rope.low_freq_factor, "low_freq_factor"),
                "high_freq_factor": _needed(rope.high_freq_factor, "high_freq_factor"),
            }
        elif scaled_by == "yarn":
            original = rope.original_max_position_embeddings or read.max_position_embeddings
            scaling = {
                "kind": "yarn",
                "factor": _needed(rope.factor, "factor"),
                "original_seq_len": _needed(original, "max_position_embeddings"),
                "beta_fast": rope.beta_fast or 32.0,
                "beta_slow": rope.beta_slow or 1.0,
                "whole_bounds": rope.truncate,
            }
        if kind in ("mixtral", "qwen3_moe"):
            is_qwen = kind == "qwen3_moe"
            width = _needed(read.moe_intermediate_size, "moe_intermediate_size") if is_qwen else read.intermediate_size
            experts = {
                "num_experts": read.num_local_experts or _needed(read.num_experts, "num_experts"),
                "top_k": _needed(read.num_experts_per_tok, "num_experts_per_tok"),
                "expert_ffn_size": width,
                "normalise_weights": bool(read.norm_topk_prob) if is_qwen else True,
            }
        return {
            "family": "decoder",
            "name": name if name and isinstance(name, str) else kind,
            "num_layers": read.num_hidden_layers,
            "hidden_size": read.hidden_size,
            "num_heads": heads,
            "num_kv_heads": read.num_key_value_heads or heads,
            "head_dim": read.head_dim or read.hidden_size // max(heads, 1),
            "ffn_size": read.intermediate_size,
            "vocab_size": read.vocab_size,
            "tied_embeddings": bool(read.tie_word_embeddings),
            "norm_eps": read.rms_norm_eps,
            "attention_bias": "qkv" if kind == "qwen2" else "all" if read.attention_bias else "none",
            "qk_norm": kind.startswith("qwen3"),
            "sliding_window": window,
            "global_attention_every": 1 if window is None else 0,
            "rope_theta": float(rope.rope_theta or read.rope_theta or 10_000.0),
            "rope_scaling": scaling,
            "experts": experts,
        }
    except KeyError as error:
        raise _unsupported(f"{where} has no {error}") from error


def _read_keys(cls: type[T], given: JsonObject, where: str) -> T:
    """Return the fields of dataclass `cls`. Raises RecipeError, which lists all negative numbers and all values of a
    type that transformers would not write or, if there are none, names the first missing key."""
    kinds = get_type_hints(cls)
    wrong = []
    hint = "name a folder written by transformers"
    for key, kind in kinds.items():
        if key not in given:
            continue
        value = given[key]
        in_range = not isinstance(value, (int, float)) or 0 <= value < math.inf
        if not is_kind(value, kind) or not in_range:
            message = f"{where} has {show_kind(given[key])} as `{key}`; expected {describe_kind(kind)}, not below 0"
            wrong.append(Problem("wrong_type", message, "init.from", hint, file=where))
    if wrong:
        raise RecipeError(wrong)
    missing = [field.name for field in fields(cls) if is_required(field) and field.name not in given]  # type: ignore[arg-type]
    if missing:
        raise _unsupported(f"{where} has no {missing[0]!r}")
    return cls(**{key: given[key] for key in kinds if key in given})


def _needed(value: T | None, key: str) -> T:
    """Return the value of a key that only some model types need. Raises KeyError if it is missing."""
    if value is None:
        raise KeyError(key)
    return value


def _unsupported(message: str) -> RecipeError:
    return RecipeError(Problem("unsupported", message, "init.from", "name another folder"))
