"""Cut a model into pipeline stages so that the rank with the most work has as little as possible.

A step takes micro-batches times the heaviest pipeline rank, and one of all others to fill and drain the pipeline; so
the heaviest rank decides (chains on chains partitioning: Pinar and Aykanat, JPDC 64, 2004). Layers may differ in time
(experts, state-space layers, windows), the embedding stands before the first and the head behind the last, and ranks
may differ in speed. Times are of one micro-batch, forward and backward, in seconds or any other unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

from trainspec_cli.plan.partition.chain import Chain
from trainspec_cli.plan.partition.problem import EQUAL, Borders, CutProblem, LayerTimes, Rank, Room
from trainspec_cli.plan.partition.rounds import cut_rounds
from trainspec_cli.recipe.keys.layout import Layout

Counts = tuple[int, ...]
"""Layers of each stage, in the order of the model."""


def cut_evenly(num_layers: int, stages: int) -> Counts:
    """Return as many layers for each stage, spare ones in the first stages."""
    even, spare = divmod(num_layers, stages)
    return tuple(even + (stage < spare) for stage in range(stages))


def cut_by_times(
    times: LayerTimes, layout: Layout, speeds: Sequence[float] = (), room: Room | None = None, equal: float = EQUAL
) -> Counts | None:
    """Return the layers of each stage under which the heaviest rank is lightest; None where no cut keeps to `room`.

    `speeds`: relative, of each pipeline rank (all alike by default); a rank at half speed takes twice as long.
    `equal`: heaviest ranks that differ by less than this part count as the same. Among those, the cut is taken that
    moves the fewest layers over borders of the even cut, so that models of one kind of layers keep that where it is as
    good.

    Exact (to `equal`) with one stage a rank; with several (interleaved, zbv) within 5% of the best, mostly exact.
    Raises ValueError where there are fewer layers than stages, or not one speed above 0 for each rank.
    """
    return _cut(CutProblem.of(times, layout, speeds, room, equal))


def rank_times_s(times: LayerTimes, counts: Sequence[int], layout: Layout, speeds: Sequence[float] = ()) -> list[float]:
    """Return the time of each pipeline rank under a cut, at its speed."""
    problem = CutProblem.of(times, layout, speeds, None, EQUAL)
    return problem.loads(tuple(accumulate(counts, initial=0)))


def _cut(problem: CutProblem) -> Counts | None:
    even = tuple(accumulate(cut_evenly(len(problem.time_before) - 1, len(problem.rank_of_stage)), initial=0))
    if problem.alike:
        return _cut_alike(problem, even)
    if len(problem.rank_of_stage) == len(problem.ranks):
        borders = Chain(problem.time_before, problem.ranks, even, problem.equal).cut()
    else:
        borders = cut_rounds(problem, even)
    return tuple(end - start for start, end in pairwise(borders)) if borders else None


# Layers that are alike


def _cut_alike(problem: CutProblem, even: Borders) -> Counts | None:
    """Return the exact cut, with any number of stages a rank: only the numbers of layers count.

    From the heaviest rank a layer goes to the one that is lightest with it, as long as that is lighter than the first:
    while a lighter cut exists, one of its ranks has more layers than now and can take one.
    """
    stages, rank_of = [end - start for start, end in pairwise(even)], problem.rank_of_stage
    layer_s = problem.time_before[-1] / even[-1]
    numbers = [0] * len(problem.ranks)
    for stage, rank in enumerate(rank_of):
        numbers[rank] += stages[stage]
    wanted = _exchange(problem.ranks, numbers, layer_s, fewest=len(stages) // len(numbers))
    loads = [_load_s(rank, number, layer_s) for rank, number in zip(problem.ranks, wanted, strict=True)]
    if max(loads) == inf:
        return None
    _hand_on(problem, stages, numbers, layer_s, max(loads) * (1 + problem.equal))
    return tuple(stages)


def _load_s(rank: Rank, number: int, layer_s: float) -> float:
    """Return the time of a rank with so many layers; infinite where it has no room for them."""
    if rank.bytes_before and rank.bytes_before[number] > rank.room_bytes:
        return inf
    return (rank.beside_s + number * layer_s) / rank.speed


def _exchange(ranks: Sequence[Rank], numbers: Sequence[int], layer_s: float, fewest: int) -> list[int]:
    """Return the best number of layers for each rank."""
    numbers = list(numbers)
    loads = [_load_s(rank, number, layer_s) for rank, number in zip(ranks, numbers, strict=True)]
    fuller = [_load_s(rank, number + 1, layer_s) for rank, number in zip(ranks, numbers, strict=True)]
    while True:
        giver = max(range(len(ranks)), key=loads.__getitem__)
        taker = min(range(len(ranks)), key=fuller.__getitem__)
        if giver == taker or numbers[giver] == fewest or fuller[taker] >= loads[giver]:
            return numbers
        for rank, step in ((giver, -1), (taker, 1)):
            numbers[rank] += step
            loads[rank] = _load_s(ranks[rank], numbers[rank], layer_s)
            fuller[rank] = _load_s(ranks[rank], numbers[rank] + 1, layer_s)


def _hand_on(problem: CutProblem, stages: list[int], numbers: list[int], layer_s: float, most_s: float) -> None:
    """Move layers from the stages of ranks over `most_s` to the nearest stages of ranks that can take one.

    `numbers`: of each rank's layers, as `stages` has them.
    """
    ranks, rank_of = problem.ranks, problem.rank_of_stage
    takes = [_load_s(rank, number + 1, layer_s) <= most_s for rank, number in zip(ranks, numbers, strict=True)]
    for rank in range(len(ranks)):
        while _load_s(ranks[rank], numbers[rank], layer_s) > most_s:
            giver = max((stage for stage, own in enumerate(rank_of) if own == rank), key=lambda at: (stages[at], at))
            takers = [stage for stage, own in enumerate(rank_of) if own != rank and takes[own]]
            taker = min(takers, key=lambda stage: (abs(stage - giver), stages[stage], stage))
            for stage, step in ((giver, -1), (taker, 1)):
                stages[stage] += step
                numbers[rank_of[stage]] += step
            number = numbers[rank_of[taker]]
            takes[rank_of[taker]] = _load_s(ranks[rank_of[taker]], number + 1, layer_s) <= most_s
