"""Convert between litgpt's model_config.yaml and the engine's decoder. Keys without a counterpart are rejected with an
error that names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.reading.files import describe_kind, is_kind, show_kind
from trainspec_cli.core.reading.yaml_file import read_yaml
from trainspec_cli.recipe.keys.model import DecoderModel

CONFIG = "model_config.yaml"
_FIXED: Mapping[str, tuple[JsonValue, tuple[JsonValue, ...]]] = {
    "norm_class_name": ("LayerNorm", ("RMSNorm",)),
    "mlp_class_name": ("GptNeoxMLP", ("LLaMAMLP",)),
    "parallel_residual": (True, (False,)),
    "shared_attention_norm": (False, (False,)),
    "bias": (True, (False,)),
    "lm_head_bias": (False, (False,)),
    "rotary_percentage": (0.25, (1.0,)),
    "rope_condense_ratio": (1, (1,)),
    "rope_interleave": (False, (False,)),
    "rope_local_base_freq": (None, (None,)),
    "norm_qk_type": ("default", ("default",)),
    "post_attention_norm": (False, (False,)),
    "post_mlp_norm": (False, (False,)),
    "norm_1": (True, (True,)),
    "norm_2": (True, (True,)),
    "attention_scores_scalar": (None, (None,)),
    "attention_logit_softcapping": (None, (None,)),
    "final_logit_softcapping": (None, (None,)),
    "sliding_window_size": (None, (None,)),
    "scale_embeddings": (False, (False,)),
    "latent_attention": (None, (None,)),
}
"""Keys that may change the architecture, each with litgpt's default and the values that leave the architecture
unchanged."""
_SCALING = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True, kw_only=True)
class LitgptSizes:
    """The keys that determine the model's shape, with litgpt's defaults."""

    name: str = ""
    n_layer: int = 16
    n_embd: int = 4096
    n_head: int = 32
    head_size: int | None = None
    n_query_groups: int | None = None
    intermediate_size: int | None = None
    vocab_size: int = 50254
    padding_multiple: int = 512
    padded_vocab_size: int | None = None
    norm_eps: float = 1e-5
    norm_qk: bool = False
    attn_bias: bool = False
    rope_base: float = 10000
    rope_adjustments: dict[str, JsonValue] | None = None


def read_model(file: Path) -> JsonObject:
    """Return the `model` section that `file` describes. Raises RecipeError and UnreadableFileError."""
    config = read_yaml(file)
    if not isinstance(config, dict):
        raise _refuse(file, f"holds {show_kind(config)}; expected keys and values")
    for key, (default, allowed) in _FIXED.items():
        if config.get(key, default) not in allowed:
            found = show_kind(config.get(key, default))
            raise _refuse(file, f"has `{key}` {found}; the engine's decoder supports {show_kind(allowed[0])}")
    kinds = get_type_hints(LitgptSizes)
    names = [field.name for field in fields(LitgptSizes) if field.name in config]
    for name in names:
        value = config[name]
        if not is_kind(value, kinds[name]) or (isinstance(value, (int, float)) and not 0 <= value < 2**53):
            raise _refuse(file, f"has {show_kind(value)} as `{name}`; expected {describe_kind(kinds[name])}")
    given: Any = {name: config[name] for name in names}
    sizes = LitgptSizes(**given)
    if sizes.intermediate_size is None or sizes.n_head < 1 or sizes.padding_multiple < 1:
        raise _refuse(file, "has no `intermediate_size`, or an `n_head` or `padding_multiple` below 1")
    scaling: JsonObject | None = None
    if (adjusted := sizes.rope_adjustments) is not None:
        keys = (*_SCALING, "original_max_seq_len")
        if set(adjusted) != {*keys}:
            known = ", ".join(keys)
            raise _refuse(file, f"scales rotary embeddings by {', '.join(adjusted)}; supported are {known}")
        scaling = {"kind": "llama3", "original_seq_len": adjusted["original_max_seq_len"]}
        scaling |= {key: adjusted[key] for key in _SCALING}
    padded = -(-sizes.vocab_size // sizes.padding_multiple) * sizes.padding_multiple
    return {
        "family": "decoder",
        "name": sizes.name or "litgpt",
        "num_layers": sizes.n_layer,
        "hidden_size": sizes.n_embd,
        "num_heads": sizes.n_head,
        "num_kv_heads": sizes.n_query_groups or sizes.n_head,
        "head_dim": sizes.head_size or sizes.n_embd // sizes.n_head,
        "ffn_size": sizes.intermediate_size,
        "vocab_size": sizes.padded_vocab_size or padded,
        "tied_embeddings": False,
        "norm_eps": float(sizes.norm_eps),
        "attention_bias": "qkv" if sizes.attn_bias else "none",
        "qk_norm": sizes.norm_qk,
        "rope_theta": float(sizes.rope_base),
        "rope_scaling": scaling,
        "experts": None,
    }


def _refuse(file: Path, message: str) -> RecipeError:
    return RecipeError(Problem("unsupported", f"{file} {message}", "init.from", "name another folder", file=str(file)))


def write_config(model: DecoderModel, seq_len: int) -> str:
    """Return the content of the file. Raises RecipeError if litgpt cannot describe the model."""
    scaling = model.rope_scaling
    if scaling is not None and scaling.kind != "llama3":
        message = f"`model.rope_scaling.kind` is {scaling.kind}, which litgpt does not support"
        raise RecipeError(Problem("unsupported", message, "model.rope_scaling", "pass --format hf"))
    theta = int(model.rope_theta) if model.rope_theta.is_integer() else model.rope_theta
    config: dict[str, JsonValue] = {key: allowed[0] for key, (_default, allowed) in _FIXED.items()} | {
        "name": model.name or "trainspec",
        "hf_config": {},
        "block_size": seq_len,
        "n_layer": model.num_layers,
        "n_embd": model.hidden_size,
        "n_head": model.num_heads,
        "head_size": model.head_dim,
        "n_query_groups": model.num_kv_heads,
        "intermediate_size": model.ffn_size,
        "vocab_size": model.vocab_size,
        "padded_vocab_size": model.vocab_size,
        "norm_eps": model.norm_eps,
        "norm_qk": model.qk_norm,
        "attn_bias": model.attention_bias == "qkv",
        "rope_base": theta,
        "rope_adjustments": None,
    }
    if scaling is not None:
        config["rope_adjustments"] = {
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_seq_len": scaling.original_seq_len,
        }
    return str(yaml.safe_dump(config))
