"""Several stages a rank (interleaved, zbv): layers move one by one, and a bounded search looks for a better cut."""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from trainspec_cli.plan.partition.problem import Borders, CutProblem, Rank

GAIN = 0.01
"""Cuts that are not lighter by this part are not searched for."""
MAX_NODES = 4000
"""The search tries so many borders at most: all that small models have, and some 10 ms."""


def cut_rounds(problem: CutProblem, even: Borders) -> Borders | None:
    """Improve the even cut, and one in proportion to speeds, by moving layers; then search for a better one."""
    found = [_move_layers(problem, borders) for borders in (even, _proportional(problem))]
    found.append(_Search(problem, min(found, key=problem.heaviest_s)).run())
    least = min(map(problem.heaviest_s, found))
    if least == inf:
        return None
    equals = [borders for borders in (even, *found) if problem.heaviest_s(borders) <= least * (1 + problem.equal)]
    return min(equals, key=lambda borders: sum(abs(a - b) for a, b in zip(borders, even, strict=True)))


def _proportional(problem: CutProblem) -> Borders:
    """Give each stage an equal part of what its rank could do in the least time, up to the nearest layer's border."""
    before, rounds = problem.time_before, len(problem.rank_of_stage) // len(problem.ranks)
    layers, stages, least_s = len(before) - 1, len(problem.rank_of_stage), problem.least_s()
    borders, ended_s = [0], 0.0
    for stage, number in enumerate(problem.rank_of_stage[:-1], 1):
        rank = problem.ranks[number]
        ended_s += max(0.0, least_s * rank.speed - rank.beside_s) / rounds
        places = range(borders[-1] + 1, layers - stages + stage + 1)
        borders.append(min(places, key=lambda place: abs(before[place] - ended_s)))
    return (*borders, layers)


def _move_layers(problem: CutProblem, borders: Borders) -> Borders:
    """Move a layer from one stage to another, those between passing one on, as long as that helps: the best such move.

    A move helps where less is missing in memory, or the heaviest ranks, in order, become lighter.
    """
    unit_s = problem.least_s() * problem.equal or 1.0
    missing = problem.missing_bytes(borders)
    best = [round(load / unit_s) for load in sorted(problem.loads(borders), reverse=True)]
    while True:
        most_s = inf if missing else (best[0] + 1) * unit_s
        moves = (
            (problem.missing_bytes(moved), [round(load / unit_s) for load in sorted(loads, reverse=True)], moved)
            for loads, moved in _moves(problem, borders, most_s)
        )
        least, lighter, moved = min(moves, default=(missing, best, borders))
        if (least, lighter) >= (missing, best):
            return borders
        missing, best, borders = least, lighter, moved


def _moves(problem: CutProblem, borders: Borders, most_s: float) -> Iterator[tuple[list[float], Borders]]:
    """Yield cuts, with their loads, that have consecutive borders one layer on or back and no rank over `most_s`.

    Without a shortage of memory (`most_s` is finite), they make the heaviest rank lighter."""
    before, rank_of, ranks = problem.time_before, problem.rank_of_stage, problem.ranks
    held, stages = problem.loads(borders), len(problem.rank_of_stage)
    heaviest = max(range(len(held)), key=held.__getitem__)
    most_of_heaviest_s = inf if most_s == inf else held[heaviest]
    for step in (1, -1):
        for first in range(1, stages):
            if step == -1 and borders[first] - borders[first - 1] == 1:
                continue
            loads = held.copy()
            for last in range(first, stages):
                layer = borders[last] - (step == -1)
                moved_s = step * (before[layer + 1] - before[layer])
                gives, takes = rank_of[last], rank_of[last - 1]
                loads[gives] -= moved_s / ranks[gives].speed
                loads[takes] += moved_s / ranks[takes].speed
                keeps_one = step == -1 or borders[last + 1] - borders[last] > 1
                if keeps_one and loads[heaviest] < most_of_heaviest_s and max(loads) <= most_s:
                    shifted = (border + step for border in borders[first : last + 1])
                    yield loads.copy(), (*borders[:first], *shifted, *borders[last + 1 :])


class _Search:
    """Searches by branch and bound, stage by stage, to within `GAIN` of the best where that ends before `MAX_NODES`, as
    it does for small models."""

    def __init__(self, problem: CutProblem, known: Borders):
        self.problem, self.best, self.nodes = problem, known, 0
        self.bound_s = problem.heaviest_s(known) / (1 + GAIN)
        self.towards = _proportional(problem)
        ranks = problem.rank_of_stage
        self.later = [tuple(set(ranks[stage:])) for stage in range(1, len(ranks) + 1)]
        """The ranks that have a stage behind each."""

    def run(self) -> Borders:
        if self.problem.least_s() <= self.bound_s:
            self._branch((0,), list(self.problem.ranks))
        return self.best

    def _branch(self, borders: Borders, ranks: list[Rank]) -> None:
        """Try the borders of the next stage, the nearest to those in proportion first. `ranks` hold those before."""
        before, stage, start = self.problem.time_before, len(borders) - 1, borders[-1]
        number = self.problem.rank_of_stage[stage]
        rank, left, layers = ranks[number], len(self.later) - stage - 1, len(before) - 1
        last = min(rank.reach(before, self.bound_s, start), layers - left)
        places = range(start + 1 if left else layers, last + 1)
        for place in sorted(places, key=lambda place: abs(place - self.towards[stage + 1])):
            self.nodes += 1
            if self.nodes > MAX_NODES:
                return
            ranks[number] = rank.holding(before, start, place)
            if not left:
                self._keep((*borders, place))
            else:
                # A branch is dead where the ranks of the stages behind cannot take all the work that is left.
                room_s = sum(self.bound_s * ranks[later].speed - ranks[later].beside_s for later in self.later[stage])
                if before[-1] - before[place] <= room_s:
                    self._branch((*borders, place), ranks)
        ranks[number] = rank

    def _keep(self, found: Borders) -> None:
        heaviest_s = self.problem.heaviest_s(found)
        if heaviest_s <= self.bound_s:  # which others may have lowered since this one's first borders
            self.best, self.bound_s = found, heaviest_s / (1 + GAIN)
