"""One stage a rank: the exact cut of some consecutive layers, by bisecting the heaviest rank's time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from trainspec_cli.plan.partition.problem import Borders, Rank


@dataclass(frozen=True)
class Chain:
    """Some consecutive layers are to be cut into one stage for each of some ranks."""

    time_before: Sequence[float]
    ranks: Sequence[Rank]
    """They stand in the order of their stages."""
    near: Borders
    """The cut that is kept where it is as good; its ends stand."""
    equal: float

    def cut(self) -> Borders | None:
        """Bisect the heaviest rank's time: a cut that is found lowers it at once to its own heaviest rank."""
        low, high = self.least_s() * (1 - self.equal), self.heaviest_s(self.near)
        if high == inf:
            found = self.walk(inf)
            if found is None:
                return None
            high = self.heaviest_s(found)
        while high - low > self.equal * high:
            middle = (low + high) / 2
            found = self.walk(middle)
            if found is None:
                low = middle
            else:
                high = min(middle, self.heaviest_s(found))
        return self.walk(high * (1 + self.equal))

    def least_s(self) -> float:
        """Return a time that no cut's heaviest rank is below: as if layers, and what stands beside, could be cut."""
        layers_s = self.time_before[self.near[-1]] - self.time_before[self.near[0]]
        alike = (layers_s + sum(rank.beside_s for rank in self.ranks)) / sum(rank.speed for rank in self.ranks)
        return max(alike, *(rank.beside_s / rank.speed for rank in self.ranks))

    def heaviest_s(self, borders: Borders) -> float:
        """Return the heaviest rank's time; infinite where a rank has no room for its layers."""
        heaviest = 0.0
        for rank, (start, end) in zip(self.ranks, pairwise(borders), strict=True):
            if rank.bytes_before and rank.bytes_before[end] - rank.bytes_before[start] > rank.room_bytes:
                return inf
            heaviest = max(heaviest, (rank.beside_s + self.time_before[end] - self.time_before[start]) / rank.speed)
        return heaviest

    def walk(self, heaviest_s: float) -> Borders | None:
        """Return the cut nearest to `near` whose ranks take at most `heaviest_s`; None where there is none.

        Stage by stage: the borders that it can end at, each with the nearest cut up to there.
        """
        before, end = self.time_before, self.near[-1]
        reached: dict[int, tuple[int, Borders]] = {self.near[0]: (0, (self.near[0],))}
        for stage, (rank, least) in enumerate(zip(self.ranks, self._least_borders(heaviest_s), strict=True), 1):
            last = end - len(self.ranks) + stage
            following: dict[int, tuple[int, Borders]] = {}
            for border, (moved, borders) in reached.items():
                for place in range(max(border + 1, least), min(rank.reach(before, heaviest_s, border), last) + 1):
                    cost = moved + abs(place - self.near[stage])
                    if place not in following or cost < following[place][0]:
                        following[place] = cost, (*borders, place)
            reached = following
        return reached[end][1] if reached else None

    def _least_borders(self, heaviest_s: float) -> Sequence[int]:
        """Return for each stage the first border behind which no more layers stand than the stages there can take."""
        before, end = self.time_before, self.near[-1]
        behind, found = 0.0, [end]
        for rank in reversed(self.ranks[1:]):
            behind += heaviest_s * rank.speed - rank.beside_s
            found.append(bisect_left(before, (before[end] - behind) * (1 - 1e-12)))
        return found[::-1]
