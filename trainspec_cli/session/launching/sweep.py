"""Sweeps: the same command line with every combination of values for some keys."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING

from trainspec_cli.core.errors import Problem, RecipeError

if TYPE_CHECKING:
    from trainspec_cli.session.recipe.load import Loaded

Sweep = tuple[str, Sequence[str]]
"""A sweep: (key, its values)."""
RANGE = re.compile(r"(.+?)\.\.(.+?)(?::(x?)(\d+))?")
"""Matches a range: `LOW..HIGH`, `LOW..HIGH:5` or `LOW..HIGH:x5`."""
NAME = "run.name"
MOST_VALUES = 1_000
"""Maximum number of values per key."""


def read_sweep(sweep: str) -> tuple[str, list[str]]:
    """Parse a sweep over values or ranges, such as `optim.lr=1e-3,3e-4`; return the key and its values. `0..4` means
    every integer, `0..1:5` five evenly spaced numbers, and `1e-4..1e-2:x5` five geometrically spaced ones. Raises
    RecipeError."""
    key, _, text = sweep.partition("=")
    values = [value for part in text.split(",") if part for value in _expand(part, sweep)]
    if not key or not values:
        message = f"--sweep is `{sweep}`; expected a key and its values"
        raise RecipeError(Problem("usage", message, hint="such as --sweep cluster.num_nodes=1,2,4,8"))
    return key, values


def _expand(part: str, sweep: str) -> list[str]:
    """Return the values of a range, including both ends; any other text is a single value."""
    found = RANGE.fullmatch(part)
    if found is None:
        return [part]
    try:
        low = float(found[1])
        high = float(found[2])
    except ValueError:  # text with two dots, such as a path
        return [part]
    count = int(found[4] or 0)
    by_ratio = bool(found[3])
    if not count and low.is_integer() and high.is_integer():
        count = int(high - low) + 1
    if not low < high or not 2 <= count <= MOST_VALUES or (by_ratio and low <= 0):
        message = f"--sweep is `{sweep}`, and `{part}` is not a rising range of 2 to {MOST_VALUES} values"
        hint = "such as 0..4 (integers), 0..1:5 (five, evenly spaced) or 1e-4..1e-2:x5 (five, geometrically spaced)"
        raise RecipeError(Problem("usage", message, hint=hint))
    parts = [step / (count - 1) for step in range(count)]
    numbers = [low * (high / low) ** at if by_ratio else low + (high - low) * at for at in parts]
    return [str(int(number)) if number.is_integer() else f"{number:.6g}" for number in numbers]


def sweep_arguments(arguments: Sequence[str], sweeps: Sequence[Sweep]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield (values, the arguments with these values) for each combination; the last key changes fastest."""
    keys = [key for key, _ in sweeps]
    others = [argument for argument in arguments if argument.partition("=")[0] not in keys]
    for values in product(*(values for _, values in sweeps)):
        yield values, [*others, *(f"{key}={value}" for key, value in zip(keys, values, strict=True))]


def load_points(
    arguments: Sequence[str], sweeps: Sequence[Sweep], load: Callable[[tuple[str, ...], list[str]], Loaded]
) -> Iterator[tuple[tuple[str, ...], Loaded]]:
    """Yield (values, recipe as returned by `load`) for each combination. If the runs would share a `run.name`, it gets
    a number: NAME-1, NAME-2, ..., skipping names in use. Raises RecipeError."""
    from trainspec_cli.session.runs.find import (
        check_name_free,
        free_names,
    )  # deferred: plans have no names, so sweeps of plans do not need it

    names: dict[str, Iterator[str]] = {}
    is_shared = bool(sweeps) and all(key != NAME for key, _ in sweeps)
    for values, point in sweep_arguments(arguments, sweeps):
        loaded = load(values, point)
        name = loaded.spec.run.name
        if name and is_shared:
            number = names.setdefault(name, free_names(name))
            unnamed = [argument for argument in point if argument.partition("=")[0] != NAME]
            loaded = load(values, [*unnamed, f"{NAME}={next(number)}"])
        elif sweeps:
            check_name_free(name)
        yield values, loaded
