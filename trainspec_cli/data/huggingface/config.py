"""Convert between config.json and the engine's decoder, by the rules of `families.FAMILIES`. Keys without a counterpart
are rejected with an error that names them."""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import describe_kind, show_kind
from trainspec_cli.data.huggingface.families import FAMILIES, LEFT_OUT
from trainspec_cli.data.huggingface.family_rules import UnreadableValueError, WrongTypeError
from trainspec_cli.data.huggingface.state_space_families import STATE_SPACE_FAMILIES
from trainspec_cli.recipe.keys.model import HybridModel, ModelSpec, TextModel
from trainspec_cli.recipe.records import build

HUB_TYPES = FAMILIES | STATE_SPACE_FAMILIES
MODEL_TYPES = tuple(HUB_TYPES)
"""Model types whose tensors the engine can represent completely."""


@lru_cache(maxsize=64)
def model_type(model: ModelSpec) -> str:
    """Return the model type of transformers for `model`: `hf_type`, or the first type whose config.json describes
    exactly this model. Raises a RecipeError that lists the keys that the most similar type does not support."""
    if not isinstance(model, TextModel):
        raise RecipeError([_misfit("family", model.family)])
    found: list[dict[str, object]] = []
    for kind in (model.hf_type,) if model.hf_type in HUB_TYPES else MODEL_TYPES:
        misfits = _misfits(model, kind) if HUB_TYPES[kind].family == model.family else None
        if misfits == {}:
            return kind
        if misfits is not None:
            found.append(misfits)
    least = min(found, key=len, default={"family": model.family})
    raise RecipeError([_misfit(key, value) for key, value in least.items()])


def _misfits(model: TextModel, kind: str) -> dict[str, object] | None:
    """Return the keys of `model` that a config.json of this type cannot express, with their values; None if models of
    this type are too different."""
    try:
        read = read_model(write_config_of(kind, model), "")
    except RecipeError:
        return None
    found, problems = build(type(model), read)
    if problems or (found.experts is None) is not (model.experts is None):
        return None
    misfits = {key: ours for key, (ours, _) in differences(model, found).items()}
    if model.experts is not None and model.experts.balance_rate and not HUB_TYPES[kind].names.choice_bias:
        misfits["experts.balance_rate"] = model.experts.balance_rate
    if model.prediction_layers and not HUB_TYPES[kind].names.predicts:
        misfits["prediction_layers"] = model.prediction_layers
    return misfits


def _misfit(key: str, value: object) -> Problem:
    message = f"`model.{key}` is {value}, which no model type supports ({', '.join(MODEL_TYPES)})"
    hint = "it cannot be exported; from Python, trainspec_cli.read_weights(RUN) and load_model(RUN) read every model"
    return Problem("unsupported", message, f"model.{key}", hint)


def write_config(model: TextModel, seq_len: int, dtype: str) -> JsonObject:
    """Return the content of config.json, with keys that both transformers 4 and 5 can read. `dtype` is torch's name."""
    kind = model_type(model)
    config: JsonObject = {"architectures": [HUB_TYPES[kind].architecture], **write_config_of(kind, model)}
    longest = model.learned_positions or seq_len
    return config | {"max_position_embeddings": longest, "torch_dtype": dtype, "use_cache": True}


def write_config_of(kind: str, model: TextModel) -> JsonObject:
    """Return the keys of config.json that describe the model, as a model of this type."""
    config: JsonObject = {"model_type": kind}
    for rule in HUB_TYPES[kind].rules:
        rule.write(model, config)
    return config


def differences(asked: TextModel, found: TextModel) -> dict[str, tuple[object, object]]:
    """Return the keys whose values make two models compute different functions, each with its values (asked, found).

    Keys that affect only training, and unused keys, may differ."""
    mine = _comparable(asked)
    theirs = _comparable(found)
    return {key: (mine.get(key), theirs.get(key)) for key in mine | theirs if mine.get(key) != theirs.get(key)}


_FREE = (
    "name",
    "hf_type",
    "prediction_layers",
    "prediction_loss_weight",
    "experts.balance_rate",
    "experts.balance_loss",
    "experts.capacity_factor",
)

_FIELDS_OF_LAYERS = (
    (
        "M",
        ("mamba_num_heads", "mamba_head_dim", "mamba_state_size", "mamba_groups", "mamba_step_min", "mamba_step_max"),
    ),
    ("*", ("num_heads", "num_kv_heads", "head_dim", "rotary_fraction", "rope_theta")),
    ("-", ("ffn_size",)),
    ("-E", ("gated_mlp", "activation")),
)
"""Kinds of layers in a hybrid model, and fields that only these use."""


def _comparable(model: TextModel) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in asdict(model).items():
        flat |= {f"{key}.{inner}": kept for inner, kept in value.items()} if isinstance(value, dict) else {key: value}
    if isinstance(model, HybridModel):
        flat |= {"layer_pattern": model.layers, "mamba_num_heads": model.mamba_heads, "mamba_expand": None}
        unused = [
            name for letters, names in _FIELDS_OF_LAYERS if not set(letters) & set(model.layers) for name in names
        ]
        return {key: value for key, value in flat.items() if key not in (*_FREE, *unused) and value is not None}
    if model.experts is not None and all(model.is_expert_layer(layer) for layer in range(model.num_layers)):
        # No layer has a dense feed-forward network, so its width has no effect.
        del flat["ffn_size"]
    if model.experts is not None:
        flat["experts.choice_bias"] = model.experts.has_choice_bias
        if model.experts.top_groups >= model.experts.num_groups:
            flat |= {"experts.num_groups": 1, "experts.top_groups": 1, "experts.group_best": 2}
    if model.sliding_window is None:
        del flat["global_attention_every"]
    if model.mla is not None:
        flat |= {"head_dim": None, "num_kv_heads": None, "mla.norm_eps": model.mla.norm_eps or model.norm_eps}
    elif model.attention_scale is None:
        flat["attention_scale"] = model.head_dim**-0.5
    return {key: value for key, value in flat.items() if key not in _FREE and value is not None}


# Read a config.json


def read_model(config: JsonObject, where: str) -> JsonObject:
    """Return the `model` section that config.json describes. Raises RecipeError; `where` names the file."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in HUB_TYPES:
        reason = f" ({LEFT_OUT[kind]})" if isinstance(kind, str) and kind in LEFT_OUT else ""
        message = f"{where} has model_type {kind!r}{reason}; supported are {', '.join(MODEL_TYPES)}"
        hint = "set model.backend=transformers to train the module of transformers itself"
        raise RecipeError(Problem("unsupported", message, "init.from", hint))
    name = config.get("_name_or_path")
    named = name if name and isinstance(name, str) else kind
    model: JsonObject = {"family": HUB_TYPES[kind].family, "name": named, "hf_type": kind}
    wrong: list[Problem] = []
    hint = "name a folder written by transformers"
    for rule in HUB_TYPES[kind].rules:
        try:
            rule.read(config, model)
        except WrongTypeError as error:
            got = f"{show_kind(error.value)} as `{error.key}`; expected {describe_kind(error.kind)}, not below 0"
            wrong.append(Problem("wrong_type", f"{where} has {got}", "init.from", hint, file=where))
        except KeyError as error:
            if not wrong:  # the key may have been read from a value of the wrong type
                raise _unsupported(f"{where} has no {error}") from error
        except UnreadableValueError as error:
            raise _unsupported(f"{where} has {error}") from error
    if wrong:
        raise RecipeError(wrong)
    return model


def _unsupported(message: str) -> RecipeError:
    return RecipeError(Problem("unsupported", message, "init.from", "name another folder"))
