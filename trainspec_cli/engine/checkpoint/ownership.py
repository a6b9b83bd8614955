"""Which rank writes which part, where several ranks hold copies of it: each part once, bytes shared out evenly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

Place = tuple[str, tuple[int, ...]]
"""(tensor's name, where the part begins in it)"""


def choose_owners(held: Sequence[dict[Place, int]]) -> dict[Place, int]:
    """`held[rank]` is what a rank holds, in bytes -> the rank that writes each part.

    The largest parts are given away first, each to the one of its holders that has the least to write so far; every
    rank that computes this from the same lists finds the same.
    """
    holders: defaultdict[Place, list[int]] = defaultdict(list)
    sizes: dict[Place, int] = {}
    for rank, places in enumerate(held):
        for place, size in places.items():
            holders[place].append(rank)
            sizes[place] = size
    owners: dict[Place, int] = {}
    load_bytes = [0] * len(held)
    for place in sorted(sizes, key=lambda place: (-sizes[place], place)):
        owner = min(holders[place], key=lambda rank: (load_bytes[rank], rank))
        load_bytes[owner] += sizes[place]
        owners[place] = owner
    return owners
