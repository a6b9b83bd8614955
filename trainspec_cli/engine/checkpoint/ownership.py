"""Which rank writes which part, where several ranks hold copies of it: each part once, bytes shared out evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from trainspec_cli.spec.structure import convert

PartKey = tuple[str, tuple[int, ...]]
"""(tensor's name, where the part begins in it)"""


def read_held(told: Iterable[tuple[Any, Any, Any]]) -> dict[PartKey, int]:
    """What a rank tells in JSON that it holds: rows of a name, offsets and bytes. Raises ValueError."""
    return {(convert(str, name), convert(tuple[int, ...], offsets)): convert(int, size) for name, offsets, size in told}


def choose_owners(held: Sequence[dict[PartKey, int]]) -> dict[PartKey, int]:
    """`held[rank]` is what a rank holds, in bytes -> the rank that writes each part.

    The largest parts are given away first, each to the one of its holders that has the least to write so far; every
    rank that computes this from the same lists finds the same.
    """
    holders: defaultdict[PartKey, list[int]] = defaultdict(list)
    sizes: dict[PartKey, int] = {}
    for rank, places in enumerate(held):
        for place, size in places.items():
            holders[place].append(rank)
            sizes[place] = size
    owners: dict[PartKey, int] = {}
    load_bytes = [0] * len(held)
    for place in sorted(sizes, key=lambda place: (-sizes[place], place)):
        owner = min(holders[place], key=lambda rank: (load_bytes[rank], rank))
        load_bytes[owner] += sizes[place]
        owners[place] = owner
    return owners
