"""Which sizes of a model fit one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainspec_cli.errors import Problem
from trainspec_cli.spec.recipe.model import ConvModel, DecoderModel, HybridModel
from trainspec_cli.spec.recipe.run import RunSpec


def heads(spec: RunSpec) -> Iterator[Problem]:
    model = spec.model
    if isinstance(model, ConvModel):
        return
    if model.num_kv_heads > 0 and model.num_heads % model.num_kv_heads:
        yield not_divisible(
            "model.num_kv_heads",
            f"{model.num_heads} heads (`model.num_heads`) do not divide by {model.num_kv_heads} key-value heads",
            model.num_heads,
            model.num_kv_heads,
        )


def rotary_width(spec: RunSpec) -> Iterator[Problem]:
    if isinstance(spec.model, DecoderModel) and spec.model.head_dim % 2:
        message = f"`model.head_dim` is {spec.model.head_dim}; rotary embeddings turn pairs and need an even number"
        hint = f"type model.head_dim={spec.model.head_dim + 1}"
        yield Problem(code="not_divisible", path="model.head_dim", message=message, hint=hint)


def expert_choice(spec: RunSpec) -> Iterator[Problem]:
    experts: Any = getattr(spec.model, "experts", None)
    if experts is not None and experts.top_k > experts.num_experts:
        message = f"a token cannot visit {experts.top_k} (`model.experts.top_k`) of {experts.num_experts} experts"
        hint = f"type model.experts.top_k={experts.num_experts} or less"
        yield Problem(code="out_of_range", path="model.experts.top_k", message=message, hint=hint)


def expert_groups(spec: RunSpec) -> Iterator[Problem]:
    """Groups are of one size, and those that a token may visit hold enough experts."""
    experts: Any = getattr(spec.model, "experts", None)
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
        hint = f"type model.experts.top_groups={min(groups, -(-experts.top_k * groups // number))} or more"
        yield Problem(code="out_of_range", path="model.experts.top_groups", message=message, hint=hint)


def expert_width(spec: RunSpec) -> Iterator[Problem]:
    """Grouped matrix products want rows of whole 16 bytes."""
    experts: Any = getattr(spec.model, "experts", None)
    if experts is None or isinstance(spec.model, ConvModel):
        return
    sizes = {"model.experts.expert_ffn_size": experts.expert_ffn_size, "model.hidden_size": spec.model.hidden_size}
    for path, size in sizes.items():
        if size % 8:
            message = f"`{path}` is {size}; experts' matrices need a multiple of 8"
            yield Problem(code="not_divisible", path=path, message=message, hint=f"type {path}={size + -size % 8}")


def layer_pattern(spec: RunSpec) -> Iterator[Problem]:
    """It has as many letters of each kind as the model has layers of it."""
    model = spec.model
    if not isinstance(model, HybridModel) or not model.layer_pattern:
        return
    pattern, counts = model.layer_pattern, model.layer_counts
    if {letter: pattern.count(letter) for letter in counts} != counts or len(pattern) != model.num_layers:
        wanted = ", ".join(f"{count} x {letter}" for letter, count in counts.items() if count)
        message = f"`model.layer_pattern` is {pattern}; the model has {wanted} (M Mamba, * attention, - MLP, E experts)"
        hint = "give as many letters, or leave it empty to spread each kind evenly"
        yield Problem(code="wrong_value", path="model.layer_pattern", message=message, hint=hint)


def position_table(spec: RunSpec) -> Iterator[Problem]:
    rows = getattr(spec.model, "learned_positions", 0)
    if rows and spec.data.seq_len > rows:
        message = f"`data.seq_len` is {spec.data.seq_len}; the model has {rows} positions (`model.learned_positions`)"
        yield Problem(code="out_of_range", path="data.seq_len", message=message, hint=f"type data.seq_len={rows}")


def mamba_heads(spec: RunSpec) -> Iterator[Problem]:
    """Each group serves equally many heads."""
    model = spec.model
    if isinstance(model, HybridModel) and model.mamba_layers and model.mamba_heads % model.mamba_groups:
        message = f"{model.mamba_heads} Mamba heads do not divide into {model.mamba_groups} groups"
        yield not_divisible("model.mamba_groups", message, model.mamba_heads, model.mamba_groups)


MODEL_RULES = (
    heads,
    rotary_width,
    expert_choice,
    expert_groups,
    expert_width,
    layer_pattern,
    position_table,
    mamba_heads,
)


def not_divisible(path: str, message: str, total: int, part: int) -> Problem:
    fitting = ", ".join(map(str, divisors(total)))
    return Problem(code="not_divisible", path=path, message=message, hint=f"{path} may be {fitting}")


def divisors(number: int, most: int = 8) -> list[Any]:
    """Of a large number the smallest few."""
    found: list[Any] = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found if len(found) <= most else [*found[:most], "..."]
