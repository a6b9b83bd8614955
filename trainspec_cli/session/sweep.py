"""A sweep: the same command line with each combination of the values that some keys take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

Sweep = tuple[str, Sequence[str]]
"""(key, its values)"""


def sweep_arguments(arguments: Sequence[str], sweeps: Sequence[Sweep]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield (values, the arguments with them) for each combination; the last key changes fastest."""
    keys = [key for key, _ in sweeps]
    others = [argument for argument in arguments if argument.partition("=")[0] not in keys]
    for values in product(*(values for _, values in sweeps)):
        yield values, [*others, *(f"{key}={value}" for key, value in zip(keys, values, strict=True))]
