"""Which sizes of a model fit one another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainspec_cli.errors import Problem
from trainspec_cli.spec.recipe.run import RunSpec


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


MODEL_RULES = (
    expert_choice,
    expert_groups,
    expert_width,
    position_table,
)


def not_divisible(path: str, message: str, total: int, part: int) -> Problem:
    fitting = ", ".join(map(str, divisors(total)))
    return Problem(code="not_divisible", path=path, message=message, hint=f"{path} may be {fitting}")


def divisors(number: int, most: int = 8) -> list[Any]:
    """Return all divisors of a number, or of a large one the smallest few."""
    found: list[Any] = [n for n in range(1, min(number, 4096) + 1) if number % n == 0]
    return found if len(found) <= most else [*found[:most], "..."]
