"""The model types of transformers that the engine's hybrid models can represent: Mamba-2, alone or mixed with
attention, feed-forward and expert layers. The rules are those of `family_rules.py`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.data.huggingface.families import HubType, Names
from trainspec_cli.data.huggingface.family_rules import (
    ACTIVATIONS,
    Always,
    Key,
    Only,
    Rule,
    UnreadableValueError,
    ValueMap,
    get,
    read_scaling,
)
from trainspec_cli.recipe.keys.model import HybridModel

INFINITY: JsonValue = {"__float__": "Infinity"}
"""What transformers writes for a number that JSON does not have."""


@dataclass(frozen=True)
class MambaHeads(Rule):
    """The heads of state-space layers. Some types also have a ratio of inner to hidden size that must agree."""

    heads: str
    head_dim: str
    expand: str
    has_ratio: bool = True
    """False if the ratio has no effect."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        heads = get(config, self.heads, int, 128)
        inner = get(config, self.expand, int, 2) * int(model["hidden_size"])  # type: ignore[arg-type]
        if self.has_ratio and config.get(self.head_dim) == "auto":
            size = inner // max(heads, 1)
        else:
            size = get(config, self.head_dim, int, 64)
        if self.has_ratio and heads * size != inner:
            raise UnreadableValueError(f"{heads} heads of {size} in state-space layers of {inner} channels")
        model |= {"mamba_num_heads": heads, "mamba_head_dim": size}

    def write(self, model: HybridModel, config: JsonObject) -> None:
        inner = model.mamba_heads * model.mamba_head_dim
        config |= {self.heads: model.mamba_heads, self.head_dim: model.mamba_head_dim}
        config[self.expand] = inner // model.hidden_size


@dataclass(frozen=True)
class StepLimits(Rule):
    """The limits of the scan's step. transformers 4 cannot read infinity, so the default is left out."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        low, high = (*get(config, "time_step_limit", list, [0.0, INFINITY]), None, None)[:2]
        limits = {"low": low, "high": None if high in (INFINITY, math.inf) else high}
        model["mamba_step_min"] = get(limits, "low", float)
        model["mamba_step_max"] = get(limits, "high", float, None)

    def write(self, model: HybridModel, config: JsonObject) -> None:
        if model.limits_step:
            high = INFINITY if model.mamba_step_max is None else model.mamba_step_max
            config["time_step_limit"] = [model.mamba_step_min, high]


def pattern_fields(letters: str) -> JsonObject:
    """Return the fields of a model with these layers."""
    kinds = {"mamba_layers": "M", "attention_layers": "*", "mlp_layers": "-", "expert_layers": "E"}
    return {"layer_pattern": letters, **{name: letters.count(letter) for name, letter in kinds.items()}}


@dataclass(frozen=True)
class ScansOnly(Rule):
    """All layers are state-space layers."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        model |= pattern_fields("M" * get(config, "num_hidden_layers", int))

    def write(self, model: HybridModel, config: JsonObject) -> None:
        config["num_hidden_layers"] = model.num_layers


@dataclass(frozen=True)
class LayerKinds(Rule):
    """A list with each layer's kind, or a pattern in the letters of Nemotron-H."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        kinds = get(config, "layers_block_type", list, None)
        pattern = get(config, "hybrid_override_pattern", str, "ME*-")
        letters = list(pattern) if kinds is None else [_KINDS.get(str(kind), "?") for kind in kinds]
        if not set(letters) <= set(_KINDS.values()):
            key = "hybrid_override_pattern" if kinds is None else "layers_block_type"
            raise UnreadableValueError(f"a kind of layer in `{key}` other than {', '.join(_KINDS)}")
        if "E" in letters:
            raise UnreadableValueError("layers with experts in a hybrid model, which are not supported yet")
        model |= pattern_fields("".join(letters))

    def write(self, model: HybridModel, config: JsonObject) -> None:
        names = dict(zip(reversed(_KINDS.values()), reversed(_KINDS), strict=True))  # the first of each letter
        config |= {"num_hidden_layers": model.num_layers, "hybrid_override_pattern": model.layers}
        config["layers_block_type"] = [names[letter] for letter in model.layers]


_KINDS = {
    "linear_attention": "M",
    "full_attention": "*",
    "mlp": "-",
    "moe": "E",
    "mamba": "M",  # in transformers 4
    "attention": "*",
}


@dataclass(frozen=True)
class AttentionLayers(Rule):
    """Each layer has a feed-forward after attention or after a scan, and the layers with attention are listed."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        layers = get(config, "num_hidden_layers", int)
        chosen = get(config, "attn_layer_indices", list, [])
        model |= pattern_fields("".join("*-" if layer in chosen else "M-" for layer in range(layers)))

    def write(self, model: HybridModel, config: JsonObject) -> None:
        mixers = model.layers[::2]
        chosen: list[JsonValue] = [layer for layer, letter in enumerate(mixers) if letter == "*"]
        config |= {"num_hidden_layers": len(mixers), "attn_layer_indices": chosen}


@dataclass(frozen=True)
class HalfRotated(Rule):
    """Half of each head is rotated (Bamba)."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        given = get(config, "rope_parameters", dict, None) or get(config, "rope_scaling", dict, None) or {}
        if (scaling := read_scaling(given, None)) is not None:
            raise UnreadableValueError(f"rotary embeddings scaled by {scaling['kind']!r} in a hybrid model")
        if (fraction := get(given, "partial_rotary_factor", float, 0.5)) != 0.5:
            raise UnreadableValueError(f"partial_rotary_factor {fraction:g}; supported is 0.5")
        theta = get(given, "rope_theta", float, None) or get(config, "rope_theta", float, 10_000.0)
        model |= {"rope_theta": theta, "rotary_fraction": 0.5}

    def write(self, model: HybridModel, config: JsonObject) -> None:
        config |= {"rope_theta": model.rope_theta, "rope_scaling": None}


_UNTIED = Key("tied_embeddings", "tie_word_embeddings", bool, False)
_UNQUANTISED = Only("quantization_config", (None,))
_NO_BIASES = (Only("attention_bias", (False,)), Only("mlp_bias", (False,)), Only("mamba_proj_bias", (False,)))
_ATTENTION = (
    Key("num_heads", "num_attention_heads", int, 32),
    Key("num_kv_heads", "num_key_value_heads", int, 8),
)
_MIXER = {
    **dict.fromkeys(("mamba_norm", "attention_norm", "ffn_norm"), "norm"),
    "mamba": "mixer",
    **{f"attention.{name}": f"mixer.{name}_proj" for name in "qkv"},
    "attention.out": "mixer.o_proj",
    "ffn.up": "mixer.up_proj",
    "ffn.down": "mixer.down_proj",
}
_BACKBONE = Names(_MIXER, embed="backbone.embeddings", norm="backbone.norm_f", layers="backbone.layers")

STATE_SPACE_FAMILIES: dict[str, HubType] = {
    "mamba2": HubType(
        "Mamba2ForCausalLM",
        (
            *(Key("hidden_size", "hidden_size", int), Key("vocab_size", "vocab_size", int), ScansOnly()),
            *(Key("mamba_state_size", "state_size", int, 128), Key("mamba_groups", "n_groups", int, 8)),
            *(MambaHeads("num_heads", "head_dim", "expand"), StepLimits()),
            *(_UNTIED, Key("norm_eps", "layer_norm_epsilon", float, 1e-5), Only("hidden_act", ("silu",))),
            *(Only("use_bias", (False,)), Only("use_conv_bias", (True,)), Only("conv_kernel", (4,)), _UNQUANTISED),
        ),
        _BACKBONE,
        family="hybrid",
    ),
    "nemotron_h": HubType(
        "NemotronHForCausalLM",
        (
            *(Key("hidden_size", "hidden_size", int), Key("vocab_size", "vocab_size", int), LayerKinds()),
            *(Key("mamba_state_size", "ssm_state_size", int, 128), Key("mamba_groups", "n_groups", int, 8)),
            MambaHeads("mamba_num_heads", "mamba_head_dim", "expand", has_ratio=False),
            *(Key("mamba_step_min", "time_step_min", float, 0.001), Always({"mamba_step_max": None})),
            *(*_ATTENTION, Key("head_dim", "head_dim", int, 128), Key("ffn_size", "intermediate_size", int, 21504)),
            *(Only("tie_word_embeddings", (False,)), Key("norm_eps", "layer_norm_epsilon", float, 1e-5)),
            ValueMap("activation", "mlp_hidden_act", ACTIVATIONS, "relu2"),
            *(Always({"gated_mlp": False}), *_NO_BIASES, _UNQUANTISED),
            *(Only("mamba_hidden_act", ("silu",)), Only("use_bias", (False,)), Only("use_conv_bias", (True,))),
            *(Only("conv_kernel", (4,)), Only("sliding_window", (None,)), Only("num_nextn_predict_layers", (0,))),
        ),
        _BACKBONE,
        family="hybrid",
    ),
    "bamba": HubType(
        "BambaForCausalLM",
        (
            *(Key("hidden_size", "hidden_size", int), Key("vocab_size", "vocab_size", int), AttentionLayers()),
            *(Key("mamba_state_size", "mamba_d_state", int, 256), Key("mamba_groups", "mamba_n_groups", int, 1)),
            *(MambaHeads("mamba_n_heads", "mamba_d_head", "mamba_expand"), StepLimits()),
            *(*_ATTENTION, Always({"head_dim": lambda model: model["hidden_size"] // max(model["num_heads"], 1)})),
            *(Key("ffn_size", "intermediate_size", int, 14336), Always({"gated_mlp": True})),
            ValueMap("activation", "hidden_act", ACTIVATIONS, "silu"),
            *(_UNTIED, Key("norm_eps", "rms_norm_eps", float, 1e-5), HalfRotated(), *_NO_BIASES, _UNQUANTISED),
            *(Only("mamba_conv_bias", (True,)), Only("mamba_d_conv", (4,))),
        ),
        Names(
            {
                **dict.fromkeys(("mamba_norm", "attention_norm"), "input_layernorm"),
                "ffn_norm": "pre_ff_layernorm",
                "mamba": "mamba",
                **{f"attention.{name}": f"self_attn.{name}_proj" for name in "qkv"},
                "attention.out": "self_attn.o_proj",
                **{f"ffn.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")},
            },
            norm="model.final_layernorm",
            merged=2,
        ),
        family="hybrid",
    ),
}
