"""Rules for a model's sizes: what fits in any model and in those of one family, and what the engine can train."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainspec_cli.core.errors import Problem
from trainspec_cli.recipe.keys.model import ConvModel, DecoderModel, HybridModel, TextModel
from trainspec_cli.recipe.keys.run import RunSpec

MAX_PHANTOM_CLASSES = 8
"""Tissues, or kinds of lesions, of phantoms that differ by enough."""


def expert_choice(spec: RunSpec) -> Iterator[Problem]:
    experts = spec.model.experts
    if experts is not None and experts.top_k > experts.num_experts:
        message = f"a token cannot visit {experts.top_k} (`model.experts.top_k`) of {experts.num_experts} experts"
        hint = f"type model.experts.top_k={experts.num_experts} or less"
        yield Problem(code="out_of_range", path="model.experts.top_k", message=message, hint=hint)


def expert_groups(spec: RunSpec) -> Iterator[Problem]:
    """Groups are of one size, and those that a token may visit hold enough experts."""
    experts = spec.model.experts
    if experts is None or experts.num_groups == 1:
        return
    number, groups = experts.num_experts, experts.num_groups
    if number % groups:
        message = f"{number} experts (`model.experts.num_experts`) do not divide into {groups} groups"
        yield not_divisible("model.experts.num_groups", message, number, groups)
    elif experts.top_groups * number // groups < experts.top_k or experts.top_groups > groups:
        message = (
            f"{experts.top_groups} of {groups} groups (`model.experts.top_groups`) are to hold a token's "
            f"{experts.top_k} experts; a group has {number // groups}"
        )
        fewest = min(groups, -(-experts.top_k * groups // number))
        allowed = f"{groups} or less" if experts.top_groups > groups else f"{fewest} or more"
        hint = f"type model.experts.top_groups={allowed}"
        yield Problem(code="out_of_range", path="model.experts.top_groups", message=message, hint=hint)


def expert_width(spec: RunSpec) -> Iterator[Problem]:
    """Grouped matrix products want rows of whole 16 bytes."""
    experts = spec.model.experts
    if experts is None:
        return
    sizes = {"model.experts.expert_ffn_size": experts.expert_ffn_size, "model.hidden_size": spec.model.hidden_size}
    for path, size in sizes.items():
        if size % 8:
            message = f"`{path}` is {size}; experts' matrices need a multiple of 8"
            yield Problem(code="not_divisible", path=path, message=message, hint=f"type {path}={size + -size % 8}")


def position_table(spec: RunSpec) -> Iterator[Problem]:
    rows = spec.model.learned_positions
    if rows and spec.data.seq_len > rows:
        message = f"`data.seq_len` is {spec.data.seq_len}; the model has {rows} positions (`model.learned_positions`)"
        yield Problem(code="out_of_range", path="data.seq_len", message=message, hint=f"type data.seq_len={rows}")


# By family


def family_sizes(spec: RunSpec) -> Iterator[Problem]:
    """Whatever is done with the model."""
    for rule in SIZES.get(spec.model.family, ()):
        yield from rule(spec.model, spec)


def family_training(spec: RunSpec) -> Iterator[Problem]:
    """Apply the family's rules where the engine is to train it; what it cannot train can still be planned."""
    for rule in TRAINING.get(spec.model.family, ()):
        yield from rule(spec.model, spec)


# Models of text


def prediction_layers(model: DecoderModel, _spec: RunSpec) -> Iterator[Problem]:
    if not model.is_built:
        message = "the engine does not build layers that predict further tokens; without them the model is the same"
        yield Problem("unsupported", message, "model.prediction_layers", "type model.prediction_layers=0")


def heads(model: TextModel, _spec: RunSpec) -> Iterator[Problem]:
    """Each key-value head serves equally many heads."""
    if model.num_kv_heads and model.num_heads % model.num_kv_heads:
        message = f"{model.num_heads} heads (`model.num_heads`) do not divide by {model.num_kv_heads} key-value heads"
        yield not_divisible("model.num_kv_heads", message, model.num_heads, model.num_kv_heads)


def rotary_width(model: DecoderModel, _spec: RunSpec) -> Iterator[Problem]:
    if model.head_dim % 2:
        message = f"`model.head_dim` is {model.head_dim}; rotary embeddings turn pairs and need an even number"
        yield Problem("not_divisible", message, "model.head_dim", f"type model.head_dim={model.head_dim + 1}")


def layer_pattern(model: HybridModel, _spec: RunSpec) -> Iterator[Problem]:
    """It has as many letters of each kind as the model has layers of it."""
    pattern, counts = model.layer_pattern, model.layer_counts
    if not pattern:
        return
    if {letter: pattern.count(letter) for letter in counts} != counts or len(pattern) != model.num_layers:
        wanted = ", ".join(f"{count} x {letter}" for letter, count in counts.items() if count)
        message = f"`model.layer_pattern` is {pattern}; the model has {wanted} (M Mamba, * attention, - MLP, E experts)"
        hint = "give as many letters, or leave it empty to spread each kind evenly"
        yield Problem("wrong_value", message, "model.layer_pattern", hint)


def mamba_heads(model: HybridModel, _spec: RunSpec) -> Iterator[Problem]:
    """Each group serves equally many heads."""
    if model.mamba_layers and model.mamba_heads % model.mamba_groups:
        message = f"{model.mamba_heads} Mamba heads do not divide into {model.mamba_groups} groups"
        yield not_divisible("model.mamba_groups", message, model.mamba_heads, model.mamba_groups)


# Convolutional networks


def known_architecture(model: ConvModel, _spec: RunSpec) -> Iterator[Problem]:
    if not model.is_built:
        message = f"the engine trains a resnet or a unet; a {model.architecture} can be planned"
        yield Problem("unsupported", message, "model.architecture", "type model.architecture=resnet")
    elif model.architecture == "resnet" and len(model.widths) != len(model.blocks):
        message = f"{len(model.widths)} stages in `model.widths`, {len(model.blocks)} in `model.blocks`"
        yield Problem("not_divisible", message, "model.blocks", "give both a number for every stage")


def fitting_input(model: ConvModel, _spec: RunSpec) -> Iterator[Problem]:
    dims = len(model.input_size)
    if dims not in ((2, 3) if model.segments else (2,)):
        allowed = "a unet takes 2 or 3" if model.segments else f"a {model.architecture} takes 2"
        yield Problem("out_of_range", f"`model.input_size` has {dims} dimensions; {allowed}", "model.input_size")
    shrinks_by = 2 ** len(model.widths)
    if model.segments and any(extent % shrinks_by for extent in model.input_size):
        message = f"`model.input_size` is {list(model.input_size)}; {len(model.widths)} levels halve every extent"
        near = ",".join(str(max(1, round(extent / shrinks_by)) * shrinks_by) for extent in model.input_size)
        yield Problem("not_divisible", message, "model.input_size", f"type model.input_size=[{near}]")


def phantom_classes(model: ConvModel, spec: RunSpec) -> Iterator[Problem]:
    fewest = 2 if model.segments else 1
    if spec.data.source == "phantom" and not fewest <= model.num_classes <= MAX_PHANTOM_CLASSES:
        message = f"`model.num_classes` is {model.num_classes}; phantoms have {fewest} to {MAX_PHANTOM_CLASSES} classes"
        yield Problem("out_of_range", message, "model.num_classes", f"type model.num_classes={MAX_PHANTOM_CLASSES}")


FamilyRule = Callable[[Any, RunSpec], Iterator[Problem]]
SIZES: dict[str, tuple[FamilyRule, ...]] = {
    "decoder": (heads, rotary_width),
    "hybrid": (heads, layer_pattern, mamba_heads),
}
TRAINING: dict[str, tuple[FamilyRule, ...]] = {
    "decoder": (prediction_layers,),
    "conv": (known_architecture, fitting_input, phantom_classes),
}
MODEL_RULES = (expert_choice, expert_groups, expert_width, position_table, family_sizes)


def not_divisible(path: str, message: str, total: int, part: int) -> Problem:
    fitting = ", ".join(map(str, divisors(total)))
    return Problem(code="not_divisible", path=path, message=message, hint=f"{path} may be {fitting}")


def divisors(number: int, most: int = 8) -> list[Any]:
    """Return all divisors of a number, or of a large one the smallest few."""
    found: list[Any] = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found if len(found) <= most else [*found[:most], "..."]
