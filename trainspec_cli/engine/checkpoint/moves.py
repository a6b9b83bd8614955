"""The slices that ranks send to one another, so that the state of one layout becomes that of another.

Parts are distinguished as in a checkpoint: by the name of the whole tensor and where they lie in it. Tenplex
(arXiv:2312.05181) derives its exchanges from such coordinates too.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainspec_cli.engine.checkpoint.image import CODES, DTYPES
from trainspec_cli.engine.checkpoint.parts import Span, TensorPart, overlap
from trainspec_cli.recipe.structure import convert

BUCKET_BYTES = 2**26
"""A rank's tensors of so many bytes, in the old layout and the new one, are moved at a time, and one at least."""


@dataclass(frozen=True)
class PartPlace:
    """A rank's part of a full tensor, without its content."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]

    @staticmethod
    def of(part: TensorPart) -> PartPlace:
        return PartPlace(part.name, part.tensor.dtype, part.offsets, part.shape, part.full_shape)

    @property
    def plain(self) -> list[Any]:
        return [self.name, CODES[self.dtype], self.offsets, self.shape, self.full_shape]

    @staticmethod
    def read(plain: Sequence[Any]) -> PartPlace:
        """The inverse of `plain`, from JSON. Raises ValueError and KeyError."""
        name, code, *places = plain
        offsets, shape, full_shape = (convert(tuple[int, ...], place) for place in places)
        return PartPlace(convert(str, name), DTYPES[code], offsets, shape, full_shape)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Move:
    """A slice of a full tensor that one rank holds in the old layout, and one (perhaps the same) in the new one."""

    name: str
    dtype: torch.dtype
    spans: tuple[Span, ...]
    """The span in each dim of the full tensor."""
    source: int
    target: int

    @property
    def bytes(self) -> int:
        return math.prod(end - begin for begin, end in self.spans) * self.dtype.itemsize

    @property
    def stays(self) -> bool:
        return self.source == self.target


Places = Sequence[Sequence[PartPlace]]
"""The parts of every rank: `places[rank]`. A rank has one part of a name at most."""


def plan_moves(old: Places, new: Places) -> list[Move]:
    """Return what fills every part of `new` from `old`, each element once, ordered by name.

    A rank takes from itself what it holds; where several others hold a slice, the takers are spread over them. Every
    rank that computes this from the same places gets the same result. Raises ValueError where the old layout lacks
    something, or holds it in another format.
    """
    holders: dict[str, dict[tuple[int, ...], list[tuple[int, PartPlace]]]] = defaultdict(lambda: defaultdict(list))
    for rank, places in enumerate(old):
        for place in places:
            holders[place.name][place.offsets].append((rank, place))
    moves: list[Move] = []
    for target, places in enumerate(new):
        for place in places:
            found = list(_filling(place, target, holders[place.name].values()))
            if sum(move.bytes for move in found) != place.bytes:
                raise ValueError(f"the ranks do not hold all of {place.name}, of {list(place.full_shape)}")
            moves += found
    return sorted(moves, key=lambda move: (move.name, move.target, move.source, move.spans))


def _filling(place: PartPlace, target: int, chunks: Iterable[list[tuple[int, PartPlace]]]) -> Iterable[Move]:
    for chunk in chunks:
        ranks, (held, *_) = [rank for rank, _ in chunk], [one for _, one in chunk]
        if (held.dtype, held.full_shape) != (place.dtype, place.full_shape):
            raise ValueError(f"{place.name} has another shape or format in the new layout")
        spans = overlap(place, held)
        if spans is not None:
            source = target if target in ranks else ranks[target % len(ranks)]
            yield Move(place.name, place.dtype, tuple(spans), source, target)


def fill_buckets(old: Places, new: Places, limit_bytes: int) -> list[list[str]]:
    """Divide the names of all tensors, in order, so that of each bucket no rank holds more than the limit in both
    layouts together; a tensor of which one does has a bucket of its own."""
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for rank, places in (*enumerate(old), *enumerate(new)):
        for place in places:
            sizes[place.name][rank] += place.bytes
    buckets: list[list[str]] = []
    taken: Counter[int] = Counter()
    for name in sorted(sizes):
        together = taken + sizes[name]
        if not buckets or max(together.values(), default=0) > limit_bytes:
            buckets.append([])
            taken = Counter()
        buckets[-1].append(name)
        taken.update(sizes[name])
    return buckets


def peak_bytes(
    old: Sequence[PartPlace],
    new: Sequence[PartPlace],
    moves: Sequence[Move],
    buckets: Sequence[Sequence[str]],
    rank: int,
) -> int:
    """Return the most that a rank holds of the state while it is moved, messages included.

    Of each bucket the new parts are allocated, then its messages, and when these have arrived the old parts are let
    go of.
    """
    before, after = (_bytes_by_name(places) for places in (old, new))
    messages: dict[str, int] = defaultdict(int)
    for move in moves:
        if not move.stays and rank in (move.source, move.target):
            messages[move.name] += move.bytes
    held = peak = sum(before.values())
    for bucket in buckets:
        held += sum(after.get(name, 0) for name in bucket)
        peak = max(peak, held + sum(messages[name] for name in bucket))
        held -= sum(before.get(name, 0) for name in bucket)
    return peak


def _bytes_by_name(places: Sequence[PartPlace]) -> dict[str, int]:
    return {place.name: place.bytes for place in places}
