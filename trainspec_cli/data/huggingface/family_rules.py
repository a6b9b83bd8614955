"""The rules for how the keys of a transformers config.json correspond to the fields of a model. Each is used in both
directions: to read a config.json and to write one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.recipe.keys.model import DecoderModel, RopeScaling

MISSING = object()


class UnreadableValueError(Exception):
    """A value in config.json that the engine's decoder cannot represent. The text completes "config.json has ..."."""


class WrongTypeError(Exception):
    """A value in config.json of a type that transformers would not write."""

    def __init__(self, key: str, value: JsonValue, kind: type):
        super().__init__(key)
        self.key = key
        self.value = value
        self.kind = kind


def get(config: JsonObject, key: str, kind: Any, default: Any = MISSING) -> Any:
    """Return a value of a config.json. Raises WrongTypeError, and KeyError for a missing key without a default."""
    value = config.get(key)
    if value is None:
        if default is MISSING:
            raise KeyError(key)
        return default
    if isinstance(value, bool) is not (kind is bool) and kind in (bool, int, float):
        raise WrongTypeError(key, value, kind)
    if kind is float and isinstance(value, int):
        try:
            value = float(value)
        except OverflowError:
            raise WrongTypeError(key, value, kind) from None
    if not isinstance(value, kind):
        raise WrongTypeError(key, value, kind)
    if kind in (int, float) and not 0 <= value < (2**63 if kind is int else math.inf):
        raise WrongTypeError(key, value, kind)
    return value


# Rules


@dataclass(frozen=True)
class Rule:
    """A part of a config.json."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        """Add fields to `model`, which holds what the rules before this one have read."""

    def write(self, model: Any, config: JsonObject) -> None:
        """Add keys to `config`. `model` is of the type's family."""


@dataclass(frozen=True)
class Key(Rule):
    """A field that is stored as it is."""

    field: str
    name: str
    kind: type
    default: Any = MISSING
    """The value if the key is missing or null: a value, or a function of the fields read so far."""
    has_null: bool = False
    """True if null is a value of its own."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        value = get(config, self.name, self.kind, None)
        if value is None and not (self.has_null and self.name in config):
            if self.default is MISSING:
                raise KeyError(self.name)
            value = self.default(model) if callable(self.default) else self.default
        model[self.field] = value

    def write(self, model: object, config: JsonObject) -> None:
        config[self.name] = getattr(model, self.field)


@dataclass(frozen=True)
class ValueMap(Rule):
    """A field with one value for each value of a key. A missing or null key counts as `default`."""

    field: str
    name: str
    values: Mapping[Any, JsonValue]
    default: Any = None

    def read(self, config: JsonObject, model: JsonObject) -> None:
        value = config.get(self.name)
        value = self.default if value is None else value
        if isinstance(value, (dict, list)) or value not in self.values:
            known = ", ".join(str(one) for one in self.values if one is not None)
            raise UnreadableValueError(f"{self.name} {value!r}; supported are {known}")
        model[self.field] = self.values[value]

    def write(self, model: object, config: JsonObject) -> None:
        value = getattr(model, self.field)
        config[self.name] = next((key for key, one in self.values.items() if one == value), None)


@dataclass(frozen=True)
class Only(Rule):
    """A key that may have only values that leave the architecture as described. The first one is written, unless it is
    None."""

    name: str
    values: tuple[JsonValue, ...]

    def read(self, config: JsonObject, model: JsonObject) -> None:
        if config.get(self.name) not in (*self.values, None):
            raise UnreadableValueError(f"{self.name} {config[self.name]!r}, which the engine's models do not support")

    def write(self, model: object, config: JsonObject) -> None:
        if self.values[0] is not None:
            config[self.name] = self.values[0]


@dataclass(frozen=True)
class Always(Rule):
    """Fields that all models of a type have. A value may be a function of the fields read so far."""

    fields: Mapping[str, Any]

    def read(self, config: JsonObject, model: JsonObject) -> None:
        for name, value in self.fields.items():
            model[name] = value(model) if callable(value) else value


@dataclass(frozen=True)
class Number(Rule):
    """A field that is a function of a number. (`attention_scale` may be None, which stands for 1 / sqrt(head_dim).)"""

    field: str
    name: str
    convert: Callable[[float], float]
    """Its own inverse, as 1 / x, or the function for reading if there is an `invert`."""
    invert: Callable[[float], float] | None = None
    default: float = 1.0
    """The value of a missing key."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        model[self.field] = self.convert(get(config, self.name, float, self.default) or self.default)

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        value = getattr(model, self.field)
        if value is None and self.field == "attention_scale":
            value = model.head_dim**-0.5
        config[self.name] = (self.invert or self.convert)(value)


ACTIVATIONS: dict[Any, JsonValue] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu2": "relu2",
}
WINDOWED, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True)
class LayerWindows(Rule):
    """The window, and which layers have it."""

    every: int | None = None
    """Every n-th layer has no window (0: all have one) unless the key `layer_types` lists other layers; None: the type
    has no such key, and all layers have the window."""
    window: int | None = None
    """The window if the key is missing."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        window = get(config, "sliding_window", int, None if "sliding_window" in config else self.window)
        layers = int(model["num_layers"])  # type: ignore[arg-type]
        types = get(config, "layer_types", list, None) if self.every is not None else None
        if not window or (types and WINDOWED not in types):
            model |= {"sliding_window": None, "global_attention_every": 1}
            return
        every = self.every or 0
        if self.every is not None:
            every = get(config, "sliding_window_pattern", int, every)
        if types is not None:
            found = [count for count in range(layers + 1) if types == _layer_types(layers, count)]
            if not found:
                raise UnreadableValueError("`layer_types` that are not the same in every n-th layer")
            every = every if every in found else found[0]
        model |= {"sliding_window": window, "global_attention_every": every}

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        config["sliding_window"] = model.sliding_window
        if self.every is not None:
            every = model.global_attention_every if model.sliding_window is not None else 1
            config["layer_types"] = list(_layer_types(model.num_layers, every))


def _layer_types(layers: int, every: int) -> list[str]:
    """Return the type of each layer if every n-th one has no window; 0: all have one."""
    return [FULL if every and (layer + 1) % every == 0 else WINDOWED for layer in range(layers)]


@dataclass(frozen=True)
class Rotation(Rule):
    """The rotary embeddings: `rope_parameters` (since transformers 5), or `rope_theta` and `rope_scaling`."""

    local: bool = False
    """True if layers with a window have their own frequencies (Gemma 3), and `rope_scaling` is that of the others."""
    fraction: float | None = None
    """The rotated fraction of a head if the key is missing; None if heads are always rotated as a whole."""
    fraction_key: str = "partial_rotary_factor"
    theta_key: str = "rope_theta"
    theta: float = 10_000.0
    """The base if it is not stated."""
    scaled_windows: bool = True
    """False if `rope_scaling` applies only to layers without a window (OLMo 3)."""
    scaling: Mapping[str, JsonValue] | None = None
    """The scaling if it is not stated."""
    latent: bool = False
    """True if a part of each head is rotated, and yarn's temperature multiplies scores (DeepSeek)."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        given = get(config, "rope_parameters", dict, None) or get(config, "rope_scaling", dict, None)
        given = dict(self.scaling or {}) if given is None else given
        local_theta: float | None = None
        if isinstance(given.get(FULL), dict):
            windowed = given.get(WINDOWED)
            assert isinstance(given[FULL], dict)
            if isinstance(windowed, dict):
                local_theta = get(windowed, "rope_theta", float, None)
                if windowed.get("rope_type", "default") != "default":
                    raise UnreadableValueError("scaled rotary embeddings in layers with a window")
            given = given[FULL]
        elif self.local:
            local_theta = get(config, "rope_local_base_freq", float, 10_000.0)
        theta = get(given, "rope_theta", float, None) or get(config, self.theta_key, float, self.theta)
        original = get(config, "original_max_position_embeddings", int, None)
        seq_len = original or get(config, "max_position_embeddings", int, None)
        scaling = read_scaling(given, seq_len, latent=self.latent)
        model |= {"rope_theta": theta, "rope_scaling": scaling}
        windowed_layers = model.get("sliding_window") is not None
        if windowed_layers and local_theta is None and scaling and not self.scaled_windows:
            local_theta = theta
        if windowed_layers and local_theta is not None and (local_theta != theta or scaling):
            model["local_rope_theta"] = local_theta
        if self.fraction is not None:
            stated = get(given, "partial_rotary_factor", float, None)
            fraction = get(config, self.fraction_key, float, self.fraction) if stated is None else stated
            if fraction != 1 and scaling and scaling["kind"] == "yarn":
                raise UnreadableValueError("rotary embeddings scaled by yarn in a part of each head")
            model["rotary_fraction"] = fraction

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        written = write_scaling(model.rope_scaling, latent=self.latent)
        whole: JsonObject = {"rope_theta": model.rope_theta, **written}
        config |= {self.theta_key: model.rope_theta, "rope_scaling": None}
        if model.rope_scaling is not None or self.scaling is not None:
            config["rope_scaling"] = written
        if self.local or not self.scaled_windows:
            theta = model.rope_theta if model.local_rope_theta is None else model.local_rope_theta
            config["rope_parameters"] = {FULL: whole, WINDOWED: {"rope_type": "default", "rope_theta": theta}}
        if self.local:
            config["rope_local_base_freq"] = model.local_rope_theta or model.rope_theta
        if self.fraction is not None:
            config[self.fraction_key] = model.rotary_fraction


def read_scaling(given: JsonObject, seq_len: int | None, *, latent: bool = False) -> JsonObject | None:
    """Return the scaling of rotary frequencies in `rope_parameters` or `rope_scaling`. `seq_len`: the length of the
    original training, unless it is stated. `latent`: as in `Rotation`."""
    kind = get(given, "rope_type", str, None) or get(given, "type", str, None) or "default"
    if kind == "default":
        return None
    if kind not in ("llama3", "yarn", "linear"):
        raise UnreadableValueError(
            f"rotary embeddings scaled by {kind!r}; supported are default, linear, llama3 and yarn"
        )
    scaling: JsonObject = {"kind": kind, "factor": get(given, "factor", float)}
    if latent and kind != "yarn" and given.get("mscale_all_dim"):
        raise UnreadableValueError(f"`mscale_all_dim` with rotary embeddings scaled by {kind!r}")
    if kind == "linear":
        return scaling
    original = get(given, "original_max_position_embeddings", int, seq_len if kind == "yarn" else None)
    if original is None:
        raise KeyError("max_position_embeddings" if kind == "yarn" else "original_max_position_embeddings")
    scaling["original_seq_len"] = original
    if kind == "llama3":
        scaling |= {name: get(given, name, float) for name in ("low_freq_factor", "high_freq_factor")}
        return scaling
    factor = get(given, "factor", float)
    if factor < 1:
        raise UnreadableValueError(f"a factor of rotary embeddings of {factor:g}, which must be at least 1")
    usual = 0.1 * math.log(factor) + 1  # the engine's (`engine/models/rope.py`)
    stated = get(given, "attention_factor", float, None)
    mscale, over_all = get(given, "mscale", float, 0.0), get(given, "mscale_all_dim", float, 0.0)
    if stated is None and mscale and over_all:
        stated = (0.1 * mscale * math.log(factor) + 1) / (0.1 * over_all * math.log(factor) + 1)
    if latent:  # the factor of the rotated part is 1, and the scores have another
        if stated is None:
            raise UnreadableValueError("yarn without `mscale` and `mscale_all_dim`, which scales a part of each head")
        usual = 1.0
        scaling["mscale"] = over_all
    if stated is not None and not math.isclose(stated, usual, rel_tol=1e-4):
        raise UnreadableValueError(f"an attention factor of yarn of {stated:g}; supported is {usual:g}")
    scaling |= {"beta_fast": get(given, "beta_fast", float, 32.0) or 32.0}
    scaling |= {"beta_slow": get(given, "beta_slow", float, 1.0) or 1.0}
    scaling |= {"whole_bounds": get(given, "truncate", bool, True)}
    return scaling


def write_scaling(scaling: RopeScaling | None, *, latent: bool = False) -> JsonObject:
    if scaling is None:
        return {"rope_type": "default"}
    written: JsonObject = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind != "linear":
        written["original_max_position_embeddings"] = scaling.original_seq_len
    if scaling.kind == "llama3":
        written |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    elif scaling.kind == "yarn":
        written |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow, "truncate": scaling.whole_bounds}
    if scaling.kind == "yarn" and latent:
        written |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale, "attention_factor": 1.0}
    return written


# Rules of single types


@dataclass(frozen=True)
class ExpertKeys(Rule):
    """A mixture of experts. `keys` maps fields of `ExpertSpec` to keys of config.json; `fixed` are values that all
    models of the type have."""

    keys: Mapping[str, str]
    fixed: Mapping[str, JsonValue] = field(default_factory=dict)
    defaults: Mapping[str, JsonValue] = field(default_factory=dict)

    def read(self, config: JsonObject, model: JsonObject) -> None:
        experts: JsonObject = dict(self.fixed)
        for name, key in self.keys.items():
            kind = _EXPERT_KINDS.get(name, int)
            default = self.defaults.get(name, _EXPERT_DEFAULTS.get(name, MISSING))
            if name == "num_experts" and config.get("num_local_experts") is not None:  # since transformers 5
                key = "num_local_experts"
            experts[name] = get(config, key, kind, default)
        if experts.get("shared_expert_ffn_size"):
            experts["shared_experts"] = 1
        model["experts"] = experts

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        if model.experts is not None:
            config |= {key: getattr(model.experts, name) for name, key in self.keys.items()}
            config["num_local_experts"] = model.experts.num_experts


_EXPERT_KINDS: dict[str, type] = {"normalise_weights": bool, "weight_scale": float}
_EXPERT_DEFAULTS: dict[str, JsonValue] = {
    "normalise_weights": False,
    "weight_scale": 1.0,
    "num_groups": 1,
    "top_groups": 1,
    "shared_experts": 0,
    "first_dense_layers": 0,
}


@dataclass(frozen=True)
class GroupChoice(Rule):
    """DeepSeek-V2's choice of experts: among all of them, or those of the groups with the best expert."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        method = config.get("topk_method") or "greedy"
        experts = model["experts"]
        assert isinstance(experts, dict)
        if method == "greedy":
            experts |= {"num_groups": 1, "top_groups": 1}
        elif method != "group_limited_greedy":
            raise UnreadableValueError(f"topk_method {method!r}; supported are greedy and group_limited_greedy")

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        if model.experts is not None:
            grouped = model.experts.top_groups < model.experts.num_groups
            config["topk_method"] = "group_limited_greedy" if grouped else "greedy"


@dataclass(frozen=True)
class LatentKeys(Rule):
    """Latent attention, with its defaults (DeepSeek's). In transformers, its norms have an epsilon of their own."""

    query: int = 1536
    plain: int = 128
    value: int = 128

    def read(self, config: JsonObject, model: JsonObject) -> None:
        query = get(config, "q_lora_rank", int, 0 if "q_lora_rank" in config else self.query)
        defaults = dict(zip(_LATENT_KEYS, (512, self.plain, 64, self.value), strict=True))
        sizes = {key: get(config, key, int, default) for key, default in defaults.items()}
        model |= {"mla": {**sizes, "q_lora_rank": query, "norm_eps": 1e-6}, "num_kv_heads": model["num_heads"]}
        model["head_dim"] = sizes["qk_nope_head_dim"]

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        if model.mla is not None:
            config |= {key: getattr(model.mla, key) for key in _LATENT_KEYS}
            config |= {"q_lora_rank": model.mla.q_lora_rank or None, "num_key_value_heads": model.num_heads}


_LATENT_KEYS = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class PredictionLayers(Rule):
    """The number of layers that predict further tokens. transformers does not load them, and does not write them though
    it writes their number, so a recipe states whether they are read (`model.prediction_layers`)."""

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        config["num_nextn_predict_layers"] = model.prediction_layers


@dataclass(frozen=True)
class DenseFirst(Rule):
    """Which layers are dense: a list of all layers' kinds, or the number of leading dense ones."""

    default: int = 1

    def read(self, config: JsonObject, model: JsonObject) -> None:
        first = get(config, "first_k_dense_replace", int, self.default)
        layers = int(model["num_layers"])  # type: ignore[arg-type]
        kinds = get(config, "mlp_layer_types", list, None)
        if kinds is not None:
            first = kinds.count("dense")
            if kinds != _mlp_types(layers, first):
                raise UnreadableValueError("`mlp_layer_types` with dense layers after expert layers")
        experts = model["experts"]
        assert isinstance(experts, dict)
        experts["first_dense_layers"] = first

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        if model.experts is not None:
            first = model.experts.first_dense_layers
            config |= {"mlp_layer_types": list(_mlp_types(model.num_layers, first)), "first_k_dense_replace": first}


def _mlp_types(layers: int, dense: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


@dataclass(frozen=True)
class ErnieLayers(Rule):
    """The layers with experts are counted from the first layer, and reach to the last one."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        layers = int(model["num_layers"])  # type: ignore[arg-type]
        if config.get("moe_layer_end_index") not in (None, -1, layers - 1):
            raise UnreadableValueError("dense layers after expert layers (`moe_layer_end_index`)")
        first = get(config, "moe_layer_start_index", int, 1)
        if first % get(config, "moe_layer_interval", int, 1):
            raise UnreadableValueError("a `moe_layer_start_index` that is not a multiple of `moe_layer_interval`")

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        config["moe_layer_end_index"] = model.num_layers - 1


@dataclass(frozen=True)
class RotaryDim(Rule):
    """The size of the rotated part of a head, which replaces its fraction (MiniMax-M2)."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        if rotated := get(config, "rotary_dim", int, 0):
            model["rotary_fraction"] = rotated / int(model["head_dim"])  # type: ignore[arg-type]

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        config["rotary_dim"] = model.rotated_size


@dataclass(frozen=True)
class FullLayers(Rule):
    """No layer has a window (dots1), though the keys allow one in the layers after `max_window_layers`."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        layers = int(model["num_layers"])  # type: ignore[arg-type]
        types = get(config, "layer_types", list, None)
        windowed = get(config, "max_window_layers", int, 62) < layers and config.get("sliding_window", 4096)
        if WINDOWED in types if types is not None else windowed:
            raise UnreadableValueError("windows in the layers after `max_window_layers`")

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        config |= {"sliding_window": None, "layer_types": [FULL] * model.num_layers}


@dataclass(frozen=True)
class Unrotated(Rule):
    """Every n-th layer is not rotated (SmolLM3)."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        every = get(config, "no_rope_layer_interval", int, 4)
        layers = int(model["num_layers"])  # type: ignore[arg-type]
        rotated = get(config, "no_rope_layers", list, None)
        if rotated is not None:
            found = [count for count in range(layers + 1) if rotated == _rotated_layers(layers, count)]
            if not found:
                raise UnreadableValueError("`no_rope_layers` that are not the same in every n-th layer")
            every = every if every in found else found[0]
        model["unrotated_every"] = every

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        every = model.unrotated_every
        config |= {
            "no_rope_layer_interval": every or model.num_layers + 1,
            "no_rope_layers": list(_rotated_layers(model.num_layers, every)),
        }


def _rotated_layers(layers: int, every: int) -> list[int]:
    return [int(not every or (layer + 1) % every != 0) for layer in range(layers)]


@dataclass(frozen=True)
class PackedExperts(Rule):
    """The experts' matrices may be stored in MXFP4. Models are written without quantisation."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        method = get(config, "quantization_config", dict, {}).get("quant_method", "mxfp4")
        if method != "mxfp4":
            raise UnreadableValueError(f"weights quantised by {method!r}; supported are mxfp4 and weights in bf16")


@dataclass(frozen=True)
class Falcon(Rule):
    """Falcon's three generations of layers."""

    def read(self, config: JsonObject, model: JsonObject) -> None:
        heads = int(model["num_heads"])  # type: ignore[arg-type]
        grouped = get(config, "new_decoder_architecture", bool, False)
        parallel = get(config, "parallel_attn", bool, True)
        if grouped:
            model["num_kv_heads"] = get(config, "num_kv_heads", int, heads)
            norms = get(config, "num_ln_in_parallel_attn", int, 2)
            model["parallel_residual"] = "two_norms" if norms == 2 else "one_norm"
        else:
            model["num_kv_heads"] = 1 if get(config, "multi_query", bool, True) else heads
            model["parallel_residual"] = "one_norm" if parallel else "none"
        biased = get(config, "bias", bool, False)
        model |= {"attention_bias": "all" if biased else "none", "mlp_bias": biased}

    def write(self, model: DecoderModel, config: JsonObject) -> None:
        grouped = model.num_kv_heads not in (1, model.num_heads) or model.parallel_residual == "two_norms"
        config |= {
            "new_decoder_architecture": grouped,
            "num_kv_heads": model.num_kv_heads,
            "multi_query": model.num_kv_heads == 1,
            "parallel_attn": model.parallel_residual != "none",
            "num_ln_in_parallel_attn": 2 if model.parallel_residual == "two_norms" else 1,
            "bias": model.mlp_bias,
        }
