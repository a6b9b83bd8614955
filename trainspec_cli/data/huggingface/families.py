"""The model types of transformers that the engine's decoder can represent: for each, how the keys of config.json
correspond to the fields of `DecoderModel`, and the names of its tensors.

A type is a row of `FAMILIES`. Its rules are used in both directions: to read a config.json and to write one. A model
can be written as a type if reading what was written gives the same model (`config.model_type`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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
