"""Pipelines: how a model's layers are split into stages, and the order of each rank's passes. This module contains
only data and arithmetic.

The engine executes these actions, and the planner's memory model replays them. Stages are chunks of consecutive layers,
numbered along the model. A rank has one stage or several (interleaved, zbv)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from math import inf
from typing import Literal, NamedTuple

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import ModelSpec

EQUAL = 1e-9
"""If the heaviest ranks of two layer splits differ by less than this fraction, they are treated as equal, because times
are sums of rounded numbers."""


@dataclass(frozen=True)
class LayerTimes:
    """The time of each layer, and of the embedding and head on the first and last stage."""

    layers_s: Sequence[float]
    embedding_s: float = 0.0
    head_s: float = 0.0


@dataclass(frozen=True)
class Room:
    """Memory limits for a layer split. Ranks with earlier stages keep activations for more micro-batches, so the bytes
    per layer depend on the rank."""

    layer_bytes: Sequence[Sequence[float]]
    """For each pipeline rank, the bytes that each layer of the model would need on that rank."""
    capacity_bytes: Sequence[float]
    """Total bytes that the layers of each pipeline rank may use."""


Borders = tuple[int, ...]
"""The first layer of each stage, followed by the total number of layers."""


@dataclass(frozen=True)
class Rank:
    speed: float
    beside_s: float
    """Time in seconds of the rank's other work: the embedding, the head, and stages that are already fixed."""
    bytes_before: Sequence[float]
    """For each layer, the total bytes that the layers before it would need on this rank; empty without a limit."""
    room_bytes: float

    def reach(self, time_before: Sequence[float], heaviest_s: float, start: int) -> int:
        """Return the latest possible end of a stage that starts at layer `start` and takes at most `heaviest_s`."""
        budget_s = heaviest_s * self.speed - self.beside_s
        end = bisect_right(time_before, time_before[start] + budget_s) - 1
        if not self.bytes_before:
            return end
        return min(end, bisect_right(self.bytes_before, self.bytes_before[start] + self.room_bytes) - 1)

    def holding(self, time_before: Sequence[float], start: int, end: int) -> Rank:
        """Return the rank with one more fixed stage."""
        taken = self.bytes_before[end] - self.bytes_before[start] if self.bytes_before else 0.0
        beside_s = self.beside_s + time_before[end] - time_before[start]
        return Rank(self.speed, beside_s, self.bytes_before, self.room_bytes - taken)


@dataclass(frozen=True)
class CutProblem:
    time_before: Sequence[float]
    """For each layer, the total time of the layers before it."""
    ranks: tuple[Rank, ...]
    """The pipeline's ranks; `beside_s` includes the embedding and the head."""
    rank_of_stage: tuple[int, ...]
    alike: bool
    """True if all layers take the same time, and the same memory on each rank."""
    equal: float

    @classmethod
    def of(
        cls, times: LayerTimes, layout: Layout, speeds: Sequence[float], room: Room | None, equal: float
    ) -> CutProblem:
        if len(times.layers_s) < layout.num_stages:
            raise ValueError(f"{len(times.layers_s)} layers do not fill {layout.num_stages} pipeline stages")
        if speeds and (len(speeds) != layout.pp or min(speeds) <= 0):
            raise ValueError(f"{layout.pp} pipeline ranks need the same number of speeds above 0, not {list(speeds)}")
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
        """Return the heaviest rank's time; infinite if a rank's layers do not fit into its memory."""
        return inf if self.missing_bytes(borders) else max(self.loads(borders))

    def missing_bytes(self, borders: Sequence[int]) -> float:
        """Return the total number of bytes that the ranks need beyond their memory."""
        if not self.ranks[0].bytes_before:
            return 0.0
        left = [rank.room_bytes for rank in self.ranks]
        for stage, rank in enumerate(self.rank_of_stage):
            before = self.ranks[rank].bytes_before
            left[rank] -= before[borders[stage + 1]] - before[borders[stage]]
        return sum(-size for size in left if size < 0)

    def least_s(self) -> float:
        """Return a lower bound on the heaviest rank's time over all layer splits, as if layers were divisible."""
        ranks = sorted(self.ranks, key=lambda rank: rank.beside_s / rank.speed)
        work_s = self.time_before[-1]
        speed = 0.0
        least = 0.0
        for rank in ranks:  # layers go only to ranks whose fixed part is below the bound
            if speed and rank.beside_s / rank.speed >= work_s / speed:
                break
            work_s = work_s + rank.beside_s
            speed = speed + rank.speed
            least = work_s / speed
        return max(least, ranks[-1].beside_s / ranks[-1].speed)


# One stage per rank: an exact split of consecutive layers, by bisecting the heaviest rank's time.


@dataclass(frozen=True)
class Chain:
    """Consecutive layers that are split into one stage for each of several ranks."""

    time_before: Sequence[float]
    ranks: Sequence[Rank]
    """The ranks in the order of their stages."""
    near: Borders
    """The layer split to prefer among equally good ones; its ends are fixed."""
    equal: float

    def cut(self) -> Borders | None:
        """Bisect the heaviest rank's time. Each split found lowers the bound to the time of its heaviest rank."""
        low = self.least_s() * (1 - self.equal)
        high = self.heaviest_s(self.near)
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
        """Return a lower bound on the heaviest rank's time over all splits, as if layers and the ranks' fixed parts
        were divisible."""
        layers_s = self.time_before[self.near[-1]] - self.time_before[self.near[0]]
        alike = (layers_s + sum(rank.beside_s for rank in self.ranks)) / sum(rank.speed for rank in self.ranks)
        return max(alike, *(rank.beside_s / rank.speed for rank in self.ranks))

    def heaviest_s(self, borders: Borders) -> float:
        """Return the heaviest rank's time; infinite if a rank's layers do not fit into its memory."""
        heaviest = 0.0
        for rank, (start, end) in zip(self.ranks, pairwise(borders), strict=True):
            if rank.bytes_before and rank.bytes_before[end] - rank.bytes_before[start] > rank.room_bytes:
                return inf
            heaviest = max(heaviest, (rank.beside_s + self.time_before[end] - self.time_before[start]) / rank.speed)
        return heaviest

    def walk(self, heaviest_s: float) -> Borders | None:
        """Return the split nearest to `near` whose ranks take at most `heaviest_s`, or None.

        The search proceeds stage by stage, and keeps the possible borders of each stage, each with the nearest split of
        the layers before it."""
        before = self.time_before
        end = self.near[-1]
        reached: dict[int, tuple[int, Borders]] = {self.near[0]: (0, (self.near[0],))}
        # For each stage, the first border after which the remaining stages can take the remaining layers.
        behind = 0.0
        least_borders = [end]
        for rank in reversed(self.ranks[1:]):
            behind += heaviest_s * rank.speed - rank.beside_s
            least_borders.append(bisect_left(before, (before[end] - behind) * (1 - 1e-12)))
        for stage, (rank, least) in enumerate(zip(self.ranks, reversed(least_borders), strict=True), 1):
            last = end - len(self.ranks) + stage
            following: dict[int, tuple[int, Borders]] = {}
            for border, (moved, borders) in reached.items():
                for place in range(max(border + 1, least), min(rank.reach(before, heaviest_s, border), last) + 1):
                    cost = moved + abs(place - self.near[stage])
                    if place not in following or cost < following[place][0]:
                        following[place] = cost, (*borders, place)
            reached = following
        return reached[end][1] if reached else None


# Several stages per rank (interleaved, zbv): layers are moved one by one, then a bounded search looks for a better
# split.


GAIN = 0.01
"""The search ignores improvements smaller than this fraction."""
MAX_NODES = 4000
"""Maximum number of stage boundaries that the search tries; this many take about 10 ms. Small models have fewer."""


def cut_rounds(problem: CutProblem, even: Borders) -> Borders | None:
    """Improve two splits by moving layers: the even one, and one proportional to the ranks' speeds. Then search for a
    better one."""
    found = [_move_layers(problem, borders) for borders in (even, _proportional(problem))]
    found.append(_Search(problem, min(found, key=problem.heaviest_s)).run())
    least = min(map(problem.heaviest_s, found))
    if least == inf:
        return None
    equals = [borders for borders in (even, *found) if problem.heaviest_s(borders) <= least * (1 + problem.equal)]
    return min(equals, key=lambda borders: sum(abs(a - b) for a, b in zip(borders, even, strict=True)))


def _proportional(problem: CutProblem) -> Borders:
    """Divide the work that each rank can do within the lower bound evenly among its stages, rounded to whole layers."""
    before = problem.time_before
    rounds = len(problem.rank_of_stage) // len(problem.ranks)
    layers = len(before) - 1
    stages = len(problem.rank_of_stage)
    least_s = problem.least_s()
    borders = [0]
    ended_s = 0.0
    for stage, number in enumerate(problem.rank_of_stage[:-1], 1):
        rank = problem.ranks[number]
        ended_s += max(0.0, least_s * rank.speed - rank.beside_s) / rounds
        places = range(borders[-1] + 1, layers - stages + stage + 1)
        borders.append(min(places, key=lambda place: abs(before[place] - ended_s)))
    return (*borders, layers)


def _move_layers(problem: CutProblem, borders: Borders) -> Borders:
    """Repeatedly move a layer from one stage to another (stages in between pass one on), choosing the best move, as
    long as that helps.

    A move helps if it reduces the missing memory, or if it makes the heaviest ranks lighter, compared from the heaviest
    down."""
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
        missing = least
        best = lighter
        borders = moved


def _moves(problem: CutProblem, borders: Borders, most_s: float) -> Iterator[tuple[list[float], Borders]]:
    """Yield splits, with their loads, in which consecutive borders are shifted by one layer and every rank stays within
    `most_s`.

    If memory is sufficient (`most_s` is finite), these splits make the heaviest rank lighter."""
    before = problem.time_before
    rank_of = problem.rank_of_stage
    ranks = problem.ranks
    held = problem.loads(borders)
    stages = len(problem.rank_of_stage)
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
                gives = rank_of[last]
                takes = rank_of[last - 1]
                loads[gives] -= moved_s / ranks[gives].speed
                loads[takes] += moved_s / ranks[takes].speed
                keeps_one = step == -1 or borders[last + 1] - borders[last] > 1
                if keeps_one and loads[heaviest] < most_of_heaviest_s and max(loads) <= most_s:
                    shifted = (border + step for border in borders[first : last + 1])
                    yield loads.copy(), (*borders[:first], *shifted, *borders[last + 1 :])


class _Search:
    """Branch-and-bound search, stage by stage, up to `MAX_NODES` nodes. If it finishes earlier, as it does for small
    models, the result is within `GAIN` of the best."""

    def __init__(self, problem: CutProblem, known: Borders):
        self.problem = problem
        self.best = known
        self.nodes = 0
        self.bound_s = problem.heaviest_s(known) / (1 + GAIN)
        self.towards = _proportional(problem)
        ranks = problem.rank_of_stage
        self.later = [tuple(set(ranks[stage:])) for stage in range(1, len(ranks) + 1)]
        """For each stage, the ranks that have a later stage."""

    def run(self) -> Borders:
        if self.problem.least_s() <= self.bound_s:
            self._branch((0,), list(self.problem.ranks))
        return self.best

    def _branch(self, borders: Borders, ranks: list[Rank]) -> None:
        """Try the boundaries of the next stage, starting with those closest to a proportional split. `ranks` already
        include the previous stages."""
        before = self.problem.time_before
        stage = len(borders) - 1
        start = borders[-1]
        number = self.problem.rank_of_stage[stage]
        rank = ranks[number]
        left = len(self.later) - stage - 1
        layers = len(before) - 1
        last = min(rank.reach(before, self.bound_s, start), layers - left)
        places = range(start + 1 if left else layers, last + 1)
        for place in sorted(places, key=lambda place: abs(place - self.towards[stage + 1])):
            self.nodes += 1
            if self.nodes > MAX_NODES:
                return
            ranks[number] = rank.holding(before, start, place)
            if not left:
                found = (*borders, place)
                heaviest_s = self.problem.heaviest_s(found)
                if heaviest_s <= self.bound_s:  # an earlier branch may have lowered the bound
                    self.best = found
                    self.bound_s = heaviest_s / (1 + GAIN)
            else:
                # Prune the branch if the ranks with later stages cannot take the remaining work.
                room_s = sum(self.bound_s * ranks[later].speed - ranks[later].beside_s for later in self.later[stage])
                if before[-1] - before[place] <= room_s:
                    self._branch((*borders, place), ranks)
        ranks[number] = rank


# Split a model into pipeline stages so that the heaviest rank's work is as small as possible.
#
# A step takes the heaviest pipeline rank's time for each micro-batch, plus every other rank's time once, to fill and
# drain the pipeline. The heaviest rank therefore matters most (chains-on-chains partitioning: Pinar and Aykanat, JPDC
# 64, 2004).
# Layers may differ in time (experts, state-space layers, windows), the embedding comes before the first layer and the
# head after the last one, and ranks may differ in speed. Times are per micro-batch, forward and backward, in seconds or
# any other unit.


Counts = tuple[int, ...]
"""Number of layers in each stage, in model order."""


def cut_evenly(num_layers: int, stages: int) -> Counts:
    """Return the even split: the same number of layers for all stages, plus one more for the first stages if layers
    remain."""
    even, spare = divmod(num_layers, stages)
    return tuple(even + (stage < spare) for stage in range(stages))


def cut_by_times(
    times: LayerTimes, layout: Layout, speeds: Sequence[float] = (), room: Room | None = None, equal: float = EQUAL
) -> Counts | None:
    """Return the number of layers in each stage that minimises the heaviest rank's time; None if no split fits into
    `room`.

    `speeds`: relative speeds of the pipeline ranks (equal by default); a rank at half speed takes twice as long.
    `equal`: heaviest ranks that differ by less than this fraction are treated as equal. Among equal splits, the one
    closest to the even split is chosen. Models with only one kind of layer therefore keep the even split if it is
    equally good.

    The result is exact (up to `equal`) with one stage per rank. With several (interleaved, zbv), it is within 5% of the
    best, and usually exact. Raises ValueError if there are fewer layers than stages, or if `speeds` does not have one
    value above 0 per rank."""
    problem = CutProblem.of(times, layout, speeds, room, equal)
    even = tuple(accumulate(cut_evenly(len(times.layers_s), layout.num_stages), initial=0))
    if problem.alike:
        return _cut_alike(problem, even)
    if len(problem.rank_of_stage) == len(problem.ranks):
        borders = Chain(problem.time_before, problem.ranks, even, problem.equal).cut()
    else:
        borders = cut_rounds(problem, even)
    return tuple(end - start for start, end in pairwise(borders)) if borders else None


def rank_times_s(times: LayerTimes, counts: Sequence[int], layout: Layout, speeds: Sequence[float] = ()) -> list[float]:
    """Return the time of each pipeline rank with this layer split, at its speed."""
    problem = CutProblem.of(times, layout, speeds, None, EQUAL)
    return problem.loads(tuple(accumulate(counts, initial=0)))


# Equal layers


def _cut_alike(problem: CutProblem, even: Borders) -> Counts | None:
    """Return the exact split for equal layers, with any number of stages per rank: only the layer counts matter.

    It moves a layer from the heaviest rank to the rank that would be lightest with it, as long as that rank stays
    lighter than the heaviest. If a lighter split exists, it gives at least one rank more layers than it has now, which
    means that this rank can take another layer."""
    stages = [end - start for start, end in pairwise(even)]
    rank_of = problem.rank_of_stage
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
    """Return the time of a rank with this many layers; infinite if they do not fit."""
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
    """Move layers from the stages of ranks that exceed `most_s` to the nearest stages of ranks that can take one.

    `numbers`: each rank's number of layers, which matches `stages`."""
    ranks = problem.ranks
    rank_of = problem.rank_of_stage
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


AS_GOOD = 1e-3
"""A layer split replaces the even one only if it makes the heaviest rank lighter by more than this fraction."""


def is_open(layout: Layout, model: ModelSpec) -> bool:
    """Return whether there is anything to split and the recipe leaves the layer split open. (Rules reject more stages
    than layers.)"""
    return layout.pp > 1 and layout.stage_layers is None and layout.num_stages <= model.num_layers


def cut(times: LayerTimes, layout: Layout, room: Room | None = None, speeds: Sequence[float] = ()) -> Layout:
    """Return the layout with the best layer split that fits into `room`; unchanged if that is the even split, or if
    none fits. `speeds`: relative speeds of the pipeline ranks, if they differ."""
    counts = cut_by_times(times, layout, speeds, room=room, equal=AS_GOOD)
    if counts is None or counts == cut_evenly(len(times.layers_s), layout.num_stages):
        return layout
    return replace(layout, stage_layers=counts)


Kind = Literal["forward", "backward", "backward_input", "backward_weight"]


class Action(NamedTuple):
    kind: Kind
    stage: int
    micro_batch: int


def cut_layers(num_layers: int, layout: Layout) -> tuple[range, ...]:
    """Return the layers of each stage: as in `stage_layers` if it is set, otherwise split evenly, with the remaining
    layers in the first stages."""
    counts = layout.stage_layers or cut_evenly(num_layers, layout.num_stages)
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


@lru_cache(maxsize=4096)
def layers_per_rank(num_layers: int, layout: Layout) -> tuple[int, ...]:
    """Return the number of layers on each pipeline rank, over all of its stages."""
    stages = cut_layers(num_layers, layout)
    return tuple(sum(len(stages[stage]) for stage in layout.stages_of_rank(rank)) for rank in range(layout.pp))


def actions(layout: Layout, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's actions in order: some forward passes (the warm-up), then alternating forward and backward
    passes.

    gpipe: all forward passes, then all backward passes (arXiv:1811.06965). 1f1b: a stage starts with as many forward
    passes as there are stages after it (arXiv:2006.09503). interleaved: 1F1B over chunks, with `pp` micro-batches of
    one chunk at a time (arXiv:2104.04473, section 2.2). A single rank processes one micro-batch after another.
    """
    return _actions(_schedule_of(layout), micro_batches)


def _schedule_of(layout: Layout) -> Layout:
    """Return a layout with only the pipeline's axes: layouts that differ in the others share their schedule, which is
    then computed once."""
    return Layout(pp=layout.pp, pipeline_schedule=layout.pipeline_schedule, virtual_stages=layout.virtual_stages)


@lru_cache(maxsize=64)
def _actions(layout: Layout, micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    pp = layout.pp
    if pp > 1 and layout.splits_backward:
        return _fill_bubbles(tuple(tuple(layout.stages_of_rank(rank)) for rank in range(pp)), micro_batches)
    schedule = layout.pipeline_schedule if pp > 1 else "1f1b"
    chunks = layout.virtual_stages if schedule == "interleaved" else 1
    turns = [(0, index) for index in range(micro_batches)]
    if schedule == "interleaved":
        starts = range(0, micro_batches, pp)
        turns = [(chunk, start + index) for start in starts for chunk in range(chunks) for index in range(pp)]
    orders = []
    for rank in range(pp):
        forwards = [Action("forward", chunk * pp + rank, index) for chunk, index in turns]
        backwards = [Action("backward", (chunks - 1 - chunk) * pp + rank, index) for chunk, index in turns]
        warmup = len(turns) if schedule == "gpipe" else pp - rank - 1
        if schedule == "interleaved":
            warmup = 2 * warmup + (chunks - 1) * pp
        warmup = min(warmup, len(turns))
        order = forwards[:warmup]
        for forward, backward in zip(forwards[warmup:], backwards, strict=False):
            order += [forward, backward]
        orders.append(tuple(order + backwards[len(turns) - warmup :]))
    return tuple(orders)


# The time of a schedule, pass by pass. A search uses the closed form (`Layout.bubble_of`), which assumes equal stages.


class TimedAction(NamedTuple):
    action: Action
    begin_s: float
    end_s: float


def _sender_of(action: Action, last: int) -> int | None:
    """Return the stage whose pass of the same kind and micro-batch gives the action its input, or None. `last`: the
    last stage."""
    kind, stage, _ = action
    if kind == "forward":
        return stage - 1 if stage > 0 else None
    if kind == "backward_weight" or stage == last:
        return None  # its rank has run the pass before it
    return stage + 1


@dataclass(frozen=True)
class _Turns:
    """The actions of all ranks in an order in which each one comes after its input."""

    actions: tuple[Action, ...]
    ranks: tuple[int, ...]
    inputs: tuple[int, ...]
    """Position of each action's input, or -1."""
    senders: tuple[int, ...]
    """The rank that sends the input, or -1 if the action's own rank computes it."""


@lru_cache(maxsize=32)
def _turns(schedule: Layout, micro_batches: int) -> _Turns:
    orders = _actions(schedule, micro_batches)
    rank_of = [schedule.rank_of_stage(stage) for stage in range(schedule.num_stages)]
    last = schedule.num_stages - 1
    in_order: list[Action] = []
    ranks: list[int] = []
    inputs: list[int] = []
    senders: list[int] = []
    positions: dict[tuple[Kind, int, int], int] = {}
    done = [0] * len(orders)
    number = sum(map(len, orders))
    while len(in_order) < number:
        number_before = len(in_order)
        for rank, order in enumerate(orders):
            while done[rank] < len(order):
                action = order[done[rank]]
                sender_stage = _sender_of(action, last)
                position = sender = -1
                if sender_stage is not None:
                    position = positions.get((action.kind, sender_stage, action.micro_batch), -1)
                    if position < 0:
                        break
                    sender = rank_of[sender_stage]
                positions[action] = len(in_order)
                in_order.append(action)
                ranks.append(rank)
                inputs.append(position)
                senders.append(-1 if sender == rank else sender)
                done[rank] += 1
        if len(in_order) == number_before:
            raise ValueError(f"the schedule of {schedule.describe()} with {micro_batches} micro-batches never ends")
    return _Turns(tuple(in_order), tuple(ranks), tuple(inputs), tuple(senders))


def _run_turns(
    turns: _Turns, passes_s: Iterable[float], hand_over_s: Callable[[int, int], float], free_s: list[float]
) -> tuple[list[float], list[float]]:
    """Return when each action begins and ends, and update `free_s`, the moments at which the ranks are free."""
    begin_s: list[float] = []
    end_s: list[float] = []
    for pass_s, rank, position, sender in zip(passes_s, turns.ranks, turns.inputs, turns.senders, strict=True):
        begins_s = free_s[rank]
        if position >= 0:
            arrives_s = end_s[position]
            if sender >= 0:
                arrives_s += hand_over_s(sender, rank)
            if arrives_s > begins_s:
                begins_s = arrives_s
        free_s[rank] = begins_s + pass_s
        begin_s.append(begins_s)
        end_s.append(free_s[rank])
    return begin_s, end_s


def replay(
    layout: Layout,
    micro_batches: int,
    action_s: Callable[[Action], float],
    hand_over_s: Callable[[int, int], float] = lambda _sender, _receiver: 0.0,
    begin_s: Sequence[float] = (),
) -> list[list[TimedAction]]:
    """Return each rank's actions with their start and end times in seconds. An action starts when its rank is free and
    its input has arrived.

    `hand_over_s`: the time of a message from one rank to another; messages do not delay one another. `begin_s`: when
    each rank starts (0 by default). Raises ValueError if the ranks wait for one another forever.
    """
    free_s = list(begin_s) or [0.0] * layout.pp
    timed: list[list[TimedAction]] = [[] for _ in free_s]
    turns = _turns(_schedule_of(layout), micro_batches)
    times = _run_turns(turns, map(action_s, turns.actions), hand_over_s, free_s)
    for rank, action, begins_s, ends_s in zip(turns.ranks, turns.actions, *times, strict=True):
        timed[rank].append(TimedAction(action, begins_s, ends_s))
    return timed


def ends_of_ranks_s(
    layout: Layout,
    micro_batches: int,
    action_s: Callable[[Action], float],
    hand_over_s: Callable[[int, int], float] = lambda _sender, _receiver: 0.0,
) -> list[float]:
    """Return the time, in seconds, at which each rank has finished its passes; see `replay`."""
    free_s = [0.0] * layout.pp
    turns = _turns(_schedule_of(layout), micro_batches)
    _run_turns(turns, map(action_s, turns.actions), hand_over_s, free_s)
    return free_s


def alike_ranks(layout: Layout, micro_batches: int) -> tuple[int, ...]:
    """Return, for each rank, the first rank that performs the same actions on its own stages."""
    return _alike_ranks(_schedule_of(layout), micro_batches)


@lru_cache(maxsize=64)
def _alike_ranks(schedule: Layout, micro_batches: int) -> tuple[int, ...]:
    first: dict[object, int] = {}
    return tuple(
        first.setdefault(tuple((kind, stage // schedule.pp, index) for kind, stage, index in order), rank)
        for rank, order in enumerate(_actions(schedule, micro_batches))
    )


# Zero bubble


@lru_cache(maxsize=64)
def _fill_bubbles(stages: tuple[tuple[int, ...], ...], micro_batches: int) -> tuple[tuple[Action, ...], ...]:
    """Build a zero-bubble schedule (arXiv:2401.10241) greedily. Each pass (forward, input gradients or weight
    gradients) takes one tick.

    `stages`: the stages of each rank. In each tick, a rank computes an input gradient that others are waiting for,
    otherwise a forward pass, otherwise weight gradients. The number of micro-batches in flight on its first chunk is at
    most the number of ranks, so it needs no more memory than the most memory-intensive stage of 1F1B.
    """
    num_stages = sum(map(len, stages))
    forwards = [0] * num_stages  # number of micro-batches that have finished the pass, per stage
    inputs = [0] * num_stages
    weights = [0] * num_stages
    done: dict[Kind, list[int]] = {"forward": forwards, "backward_input": inputs, "backward_weight": weights}

    def choose(own: Sequence[int]) -> tuple[Kind, int] | None:
        """Return a rank's next possible pass. Later stages come first, because more ranks wait for their gradients."""
        for stage in reversed(own):
            index = inputs[stage]
            if forwards[stage] > index and (stage == num_stages - 1 or inputs[stage + 1] > index):
                return "backward_input", stage
        is_full = forwards[own[0]] - weights[own[0]] >= len(stages)
        for stage in reversed(own):
            index = forwards[stage]
            held_back = is_full and stage == own[0]
            if index < micro_batches and not held_back and (stage == 0 or forwards[stage - 1] > index):
                return "forward", stage
        return next((("backward_weight", stage) for stage in reversed(own) if inputs[stage] > weights[stage]), None)

    orders: list[list[Action]] = [[] for _ in stages]
    left = 3 * num_stages * micro_batches
    while left:
        taken = [choose(own) for own in stages]
        for order, chosen in zip(orders, taken, strict=True):
            if chosen is not None:
                kind, stage = chosen
                order.append(Action(kind, stage, done[kind][stage]))
                done[kind][stage] += 1
                left -= 1
    return tuple(map(tuple, orders))
