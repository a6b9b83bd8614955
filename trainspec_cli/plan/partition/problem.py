"""A cut into pipeline stages as a problem: the layers' times and bytes, and the ranks that take them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from trainspec_cli.recipe.keys.layout import Layout

EQUAL = 1e-9
"""Relative: heaviest ranks that differ by less are the same, for times are sums of rounded numbers."""


@dataclass(frozen=True)
class LayerTimes:
    """The time of each layer, and of what the first and the last stage hold besides."""

    layers_s: Sequence[float]
    embedding_s: float = 0.0
    head_s: float = 0.0


@dataclass(frozen=True)
class Room:
    """Memory that bounds a cut. A rank of an earlier stage keeps a layer's activations for more micro-batches, so
    that one layer takes other bytes on other ranks."""

    layer_bytes: Sequence[Sequence[float]]
    """Bytes of every layer of the model on each pipeline rank, were it there."""
    capacity_bytes: Sequence[float]
    """Bytes that all layers of each pipeline rank may take together."""


Borders = tuple[int, ...]
"""The first layer of each stage, and behind them the number of layers."""


@dataclass(frozen=True)
class Rank:
    speed: float
    beside_s: float
    """Seconds of what is not cut here: the embedding, the head, stages that stand already."""
    bytes_before: Sequence[float]
    """The layers before each take so many bytes on this rank; empty without a bound."""
    room_bytes: float

    def reach(self, time_before: Sequence[float], heaviest_s: float, start: int) -> int:
        """Return the last border that a stage from `start` can have with no more than `heaviest_s`."""
        budget_s = heaviest_s * self.speed - self.beside_s
        end = bisect_right(time_before, time_before[start] + budget_s) - 1
        if not self.bytes_before:
            return end
        return min(end, bisect_right(self.bytes_before, self.bytes_before[start] + self.room_bytes) - 1)

    def holding(self, time_before: Sequence[float], start: int, end: int) -> Rank:
        """Return the rank with a stage that stands."""
        taken = self.bytes_before[end] - self.bytes_before[start] if self.bytes_before else 0.0
        beside_s = self.beside_s + time_before[end] - time_before[start]
        return Rank(self.speed, beside_s, self.bytes_before, self.room_bytes - taken)


@dataclass(frozen=True)
class CutProblem:
    time_before: Sequence[float]
    """The layers before each take so long together."""
    ranks: tuple[Rank, ...]
    """The pipeline's ranks; the embedding and the head stand beside the layers of theirs."""
    rank_of_stage: tuple[int, ...]
    alike: bool
    """All layers take the same time, and on one rank the same memory."""
    equal: float

    @classmethod
    def of(
        cls, times: LayerTimes, layout: Layout, speeds: Sequence[float], room: Room | None, equal: float
    ) -> CutProblem:
        if len(times.layers_s) < layout.num_stages:
            raise ValueError(f"{len(times.layers_s)} layers do not fill {layout.num_stages} pipeline stages")
        if speeds and (len(speeds) != layout.pp or min(speeds) <= 0):
            raise ValueError(f"{layout.pp} pipeline ranks need as many speeds above 0, not {list(speeds)}")
        rank_of_stage = tuple(layout.rank_of_stage(stage) for stage in range(layout.num_stages))
        beside = [0.0] * layout.pp
        beside[rank_of_stage[0]] += times.embedding_s
        beside[rank_of_stage[-1]] += times.head_s
        ranks = []
        for rank in range(layout.pp):
            bytes_before = tuple(accumulate(room.layer_bytes[rank], initial=0.0)) if room else ()
            capacity = room.capacity_bytes[rank] if room else inf
            ranks.append(Rank(speeds[rank] if speeds else 1.0, beside[rank], bytes_before, capacity))
        rows = [times.layers_s, *(room.layer_bytes if room else ())]
        alike = all(len(set(row)) == 1 for row in rows)
        return cls(tuple(accumulate(times.layers_s, initial=0.0)), tuple(ranks), rank_of_stage, alike, equal)

    def loads(self, borders: Sequence[int]) -> list[float]:
        """Return the time of each rank."""
        loads = [rank.beside_s for rank in self.ranks]
        for stage, rank in enumerate(self.rank_of_stage):
            loads[rank] += self.time_before[borders[stage + 1]] - self.time_before[borders[stage]]
        return [load / rank.speed for load, rank in zip(loads, self.ranks, strict=True)]

    def heaviest_s(self, borders: Sequence[int]) -> float:
        """Return the heaviest rank's time; infinite where a rank has no room for its layers."""
        return inf if self.missing_bytes(borders) else max(self.loads(borders))

    def missing_bytes(self, borders: Sequence[int]) -> float:
        """Return how many bytes the ranks lack, all together."""
        if not self.ranks[0].bytes_before:
            return 0.0
        left = [rank.room_bytes for rank in self.ranks]
        for stage, rank in enumerate(self.rank_of_stage):
            before = self.ranks[rank].bytes_before
            left[rank] -= before[borders[stage + 1]] - before[borders[stage]]
        return sum(-size for size in left if size < 0)

    def least_s(self) -> float:
        """Return a time that no cut's heaviest rank is below: that of layers that could be cut themselves."""
        ranks = sorted(self.ranks, key=lambda rank: rank.beside_s / rank.speed)
        work_s, speed, least = self.time_before[-1], 0.0, 0.0
        for rank in ranks:  # those whose own part is lighter share the layers
            if speed and rank.beside_s / rank.speed >= work_s / speed:
                break
            work_s, speed = work_s + rank.beside_s, speed + rank.speed
            least = work_s / speed
        return max(least, ranks[-1].beside_s / ranks[-1].speed)
