"""Divide samples among ranks, and layers among stages, so that the slowest one finishes as early as possible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, cycle
from statistics import mean, median_low
from typing import NamedTuple

from trainspec_cli.balance.batch.division import Division, count_micro_batches, largest_that_fits
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.planner.pipeline import Counts, LayerTimes, Room, cut_by_times, cut_evenly, rank_times_s
from trainspec_cli.recipe.field_types import AUTO, AutoInt
from trainspec_cli.recipe.keys.layout import Layout

EVEN_ENOUGH = 0.02
"""The even division is kept or restored unless the best division is faster by more than this fraction."""
SAME = 1e-9
"""Relative tolerance for comparing times, needed because they are sums of rounded numbers."""
TRIED = 8
"""Maximum number of micro-batch counts to try besides the usual one."""
MORE_TURNS = 4
"""Number of additional micro-batches to try if a fast rank's samples do not fit into memory with the usual number of
micro-batches."""


@dataclass(frozen=True)
class Balanced:
    """A division of the samples and its expected time."""

    division: Division
    compute_s: float
    """Compute time of the slowest rank in a step, plus the time of the exchanges in all micro-batches."""


def compute_s(division: Division, samples: int, speeds: Sequence[Speed], exchange_s: float) -> float:
    """Return the time of the slowest rank's passes and update in a step of `samples`, plus that of the exchanges in its
    micro-batches.

    `exchange_s`: duration of the exchanges in one micro-batch, such as gathering sharded parameters.
    """
    counts = division.counts(samples)
    micro_batches = division.count_micro_batches(samples)
    if division.in_step:
        return _in_step_s(((*_line(speed), n) for speed, n in zip(speeds, counts, strict=True)), micro_batches) + (
            micro_batches * exchange_s
        )
    times_s = (speed.step_s(count, micro_batches) for speed, count in zip(speeds, counts, strict=True))
    return max(times_s) + micro_batches * exchange_s


def _with_bubble(compute_s: float, update_s: float, division: Division, micro_batches: int) -> float:
    """Return `compute_s`, which includes `update_s` for the update, plus the time to fill and drain a pipeline of
    equally long stages. The fewer and larger the micro-batches are, the longer the pipeline is idle."""
    return compute_s + (compute_s - update_s) * division.bubble / micro_batches


def _line(speed: Speed) -> tuple[float, float]:
    return speed.fixed_s, speed.per_sample_s


def _in_step_s(ranks: Iterable[tuple[float, float, int]], micro_batches: int) -> float:
    """Return the total time of ranks that wait for the slowest one in each micro-batch: the slowest rank's time, summed
    over all micro-batches. Each rank is (fixed_s, per_sample_s, samples), and processes its larger micro-batches
    first."""
    # Even thousands of ranks have only a few distinct counts of larger micro-batches, so each micro-batch needs only
    # two running maxima instead of all ranks. The two lists contain the slowest rank's time in seconds for a larger and
    # for a smaller micro-batch, indexed by the number of larger micro-batches on a rank.
    larger_s = [0.0] * (micro_batches + 1)
    smaller_s = [0.0] * (micro_batches + 1)
    for fixed_s, sample_s, samples in ranks:
        each, larger = divmod(samples, micro_batches)
        own_s = fixed_s + each * sample_s
        smaller_s[larger] = max(smaller_s[larger], own_s)
        larger_s[larger] = max(larger_s[larger], own_s + sample_s)
    # Entry i: the maximum over the ranks with more than i larger micro-batches.
    in_larger_s = list(accumulate(reversed(larger_s), max))[-2::-1]
    in_smaller_s = list(accumulate(smaller_s, max))
    return sum(max(in_larger_s[turn], in_smaller_s[turn]) for turn in range(micro_batches))


def solve_counts(samples: int, micro_batches: int, speeds: Sequence[Speed], most: int) -> tuple[int, ...]:
    """Return the number of samples for each rank that minimises the slowest rank's time. The result is the exact
    optimum in whole samples.

    Each rank gets at most `most` samples, and at least one if there are enough. Raises ValueError if the ranks cannot
    hold all samples.

    In the real-valued optimum, all ranks take the same time. Its counts are rounded down, which leaves less than one
    sample per rank, and each remaining sample goes to the rank that would finish it first."""
    kinds = _Kinds.of(speeds)
    return kinds.of_ranks(_solve(samples, micro_batches, kinds, most))


def solve_in_step(samples: int, micro_batches: int, speeds: Sequence[Speed], largest: int) -> tuple[int, ...]:
    """Return the number of samples for each rank that approximately minimises the total time of the slowest
    micro-batches. Ranks wait for one another in every micro-batch, and a micro-batch holds at most `largest` samples.
    The result is optimal in 97 of 100 small cases, and at most 25% above the optimum in the others.

    Each rank gets at least one sample if there are enough. Raises ValueError if the micro-batches cannot hold all
    samples."""
    kinds = _Kinds.of(speeds)
    return kinds.of_ranks(_solve_in_step(samples, micro_batches, kinds, largest))


class _Solved(NamedTuple):
    """The number of samples for each kind of rank. The first `ahead` ranks of the kind `odd` have one more sample."""

    counts: list[int]
    odd: int
    ahead: int

    @property
    def most(self) -> int:
        return max(max(self.counts), self.counts[self.odd] + (self.ahead > 0))


class _Kinds(NamedTuple):
    """Ranks grouped by speed, because even thousands of ranks have few distinct speeds."""

    fixed_s: list[float]
    sample_s: list[float]
    update_s: list[float]
    ranks: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, speeds: Sequence[Speed]) -> _Kinds:
        found: dict[tuple[float, float, float], list[int]] = {}
        for rank, speed in enumerate(speeds):
            found.setdefault((speed.fixed_s, speed.per_sample_s, speed.update_s), []).append(rank)
        fixed_s, sample_s, update_s = map(list, zip(*found, strict=True))
        ranks = list(found.values())
        return cls(fixed_s, sample_s, update_s, ranks, list(map(len, ranks)))

    def of_ranks(self, solved: _Solved) -> tuple[int, ...]:
        """Return the number of samples for each rank."""
        counts = [0] * sum(self.sizes)
        for ranks, count in zip(self.ranks, solved.counts, strict=True):
            for rank in ranks:
                counts[rank] = count
        for rank in self.ranks[solved.odd][: solved.ahead]:
            counts[rank] += 1
        return tuple(counts)

    def slowest_s(self, solved: _Solved, micro_batches: int) -> float:
        """Return the time at which the last rank finishes."""
        lines = self.lines(micro_batches)
        last_s = max(line.end_s(count) for line, count in zip(lines, solved.counts, strict=True))
        return max(last_s, lines[solved.odd].end_s(solved.counts[solved.odd] + (solved.ahead > 0)))

    def lines(self, micro_batches: int) -> list[_Line]:
        """Return the time of each kind of rank, which is linear in the samples for a fixed number of micro-batches."""
        return [
            _Line(micro_batches * fixed_s + update_s, sample_s, size)
            for fixed_s, sample_s, update_s, size in zip(
                self.fixed_s, self.sample_s, self.update_s, self.sizes, strict=True
            )
        ]

    def in_step_s(self, solved: _Solved, micro_batches: int) -> float:
        """Return the time at which the last rank finishes if ranks wait for one another in each micro-batch."""
        odd = self.fixed_s[solved.odd], self.sample_s[solved.odd], solved.counts[solved.odd] + (solved.ahead > 0)
        whole = zip(self.fixed_s, self.sample_s, solved.counts, strict=True)
        return _in_step_s((*whole, odd), micro_batches)

    def without(self, left_out: Collection[int]) -> _Kinds:
        kept = [kind for kind in range(len(self.sizes)) if kind not in left_out]
        return _Kinds(*([column[kind] for kind in kept] for column in self))  # type: ignore[arg-type]


def _solve_in_step(samples: int, micro_batches: int, kinds: _Kinds, largest: int) -> _Solved:
    """Solve `solve_in_step` per kind of rank. Of two solutions (that of `_fill_turns`, and shares proportional to
    speed), return the faster one."""
    filled = _leave_out_idle(samples, micro_batches, kinds, largest)
    shared = _solve(samples, micro_batches, kinds, micro_batches * largest)
    return min(filled, shared, key=lambda solved: kinds.in_step_s(solved, micro_batches))


def _leave_out_idle(samples: int, micro_batches: int, kinds: _Kinds, largest: int) -> _Solved:
    """Return the solution of `_fill_turns`, except that ranks that are too slow for a proportional share get one sample
    each, and the others get the rest."""
    solved = _fill_turns(samples, micro_batches, kinds, largest)
    idle = {kind for kind, count in enumerate(solved.counts) if not count}
    if not idle or samples < sum(kinds.sizes):
        return solved
    given = sum(kinds.sizes[kind] for kind in idle)
    busy = [kind for kind in range(len(kinds.sizes)) if kind not in idle]
    if not busy or samples - given > micro_batches * largest * sum(kinds.sizes[kind] for kind in busy):
        return _solve(samples, micro_batches, kinds, micro_batches * largest)
    rest = _leave_out_idle(samples - given, micro_batches, kinds.without(idle), largest)
    counts = [1] * len(kinds.sizes)
    for kind, count in zip(busy, rest.counts, strict=True):
        counts[kind] = count
    return _Solved(counts, busy[rest.odd], rest.ahead)


def _fill_turns(samples: int, micro_batches: int, kinds: _Kinds, largest: int) -> _Solved:
    """Fill each turn (one micro-batch on every rank) with samples so that all ranks finish as early as possible. As
    many turns as possible omit the samples that would finish last."""
    turn = _solve(math.ceil(samples / micro_batches), 1, kinds, largest, least=0)
    limit_s = kinds.slowest_s(turn, 1)
    lines = list(zip(kinds.fixed_s, kinds.sample_s, kinds.sizes, strict=True))
    longer = [min(largest, max(0, math.floor((limit_s * (1 + SAME) - fixed) / each))) for fixed, each, _ in lines]
    shorter = [min(largest, max(0, math.ceil((limit_s * (1 - SAME) - fixed) / each) - 1)) for fixed, each, _ in lines]
    held = sum(count * size for count, (*_, size) in zip(shorter, lines, strict=True))
    more = sum((high - low) * size for high, low, (*_, size) in zip(longer, shorter, lines, strict=True))
    turns = max(0, math.ceil((samples - micro_batches * held) / more)) if more else 0
    counts = [micro_batches * low + turns * (high - low) for high, low in zip(longer, shorter, strict=True)]
    over = micro_batches * held + turns * more - samples
    order = sorted(range(len(lines)), key=lambda kind: (shorter[kind] - longer[kind], -lines[kind][1]))
    for kind in cycle(order):
        if not over:
            break
        if not counts[kind]:
            continue
        counts[kind] -= 1
        if over < kinds.sizes[kind]:
            return _Solved(counts, kind, kinds.sizes[kind] - over)
        over -= kinds.sizes[kind]
    return _Solved(counts, 0, 0)


def _solve(samples: int, micro_batches: int, kinds: _Kinds, most: int, least: int | None = None) -> _Solved:
    """Solve `solve_counts` per kind of rank. `least`: minimum number of samples per rank."""
    ranks = sum(kinds.sizes)
    if samples > most * ranks:
        raise ValueError(f"{samples} samples are more than {most} on each of {ranks} ranks")
    if least is None:
        least = 1 if samples >= ranks else 0
    lines = kinds.lines(micro_batches)
    level_s = _common_time_s(samples, lines, most)
    counts = [min(most, max(least, int((level_s - start_s) // sample_s))) for start_s, sample_s, _ in lines]
    missing = samples - sum(count * size for count, size in zip(counts, kinds.sizes, strict=True))
    if missing >= 0:
        return _shift(counts, kinds.sizes, missing, most, 1, lambda n: lines[n].end_s(counts[n] + 1))
    return _shift(counts, kinds.sizes, -missing, least, -1, lambda n: -lines[n].end_s(counts[n]))


class _Line(NamedTuple):
    """The time of one kind of rank, as a linear function of the number of samples."""

    start_s: float
    sample_s: float
    ranks: int

    def end_s(self, samples: int) -> float:
        return self.start_s + samples * self.sample_s


def _shift(
    counts: list[int], sizes: Sequence[int], samples: int, limit: int, change: int, key: Callable[[int], float]
) -> _Solved:
    """Add (`change` = 1) or remove (`change` = -1) samples one by one, each on the rank with the smallest key among
    those not at `limit`."""
    queue = [(key(kind), kind) for kind in range(len(counts)) if counts[kind] != limit] if samples else []
    heapq.heapify(queue)
    while samples:
        kind = queue[0][1]
        if samples < sizes[kind]:
            counts[kind] -= change < 0
            return _Solved(counts, kind, samples if change > 0 else sizes[kind] - samples)
        samples -= sizes[kind]
        counts[kind] += change
        if counts[kind] != limit:
            heapq.heapreplace(queue, (key(kind), kind))
        else:
            heapq.heappop(queue)
    return _Solved(counts, 0, 0)


def _common_time_s(samples: int, lines: Sequence[_Line], most: int) -> float:
    """Return the time that all ranks together need for `samples`, with 0 to `most` samples on each rank. The number of
    finished samples grows piecewise linearly with the time. Each round sets aside the ranks that are at a limit (0 or
    `most`), until the common time keeps all other ranks within their limits."""
    free = list(lines)
    left = float(samples)
    while free:
        work = sum(ranks / sample_s for _, sample_s, ranks in free)
        time_s = (left + sum(ranks * start_s / sample_s for start_s, sample_s, ranks in free)) / work
        below = [line for line in free if line[0] + most * line[1] >= time_s]
        if len(below) < len(free):
            left -= most * (sum(line[2] for line in free) - sum(line[2] for line in below))
            free = below
            continue
        busy = [line for line in free if line[0] <= time_s]
        if len(busy) == len(free):
            return time_s
        free = busy
    return max(line.end_s(most) for line in lines)


def best_division(
    even: Division,
    samples: int,
    speeds: Sequence[Speed],
    largest_micro_batch: int,
    exchange_s: float,
    *,
    keeps_micro_batches: bool = False,
) -> Balanced:
    """Return the fastest division of `samples` among ranks with these speeds, in micro-batches of at most
    `largest_micro_batch` samples. If none is clearly faster than the even division, return the even one.

    `exchange_s`: see `compute_s`. `keeps_micro_batches`: keep the number of micro-batches.
    """
    best = Balanced(even, compute_s(even, samples, speeds, exchange_s))
    usual = even.count_micro_batches(samples)
    update_s = max(speed.update_s for speed in speeds)
    best_s = _with_bubble(best.compute_s, update_s, even, usual)
    kept_s = best_s * (1 - EVEN_ENOUGH)
    kinds = _Kinds.of(speeds)
    found = None
    tried = [usual] if keeps_micro_batches else _numbers(usual, even, samples, kinds, largest_micro_batch)
    for micro_batches in tried:
        most = micro_batches * largest_micro_batch
        if even.in_step:
            solved = _solve_in_step(samples, micro_batches, kinds, largest_micro_batch)
            found_s = kinds.in_step_s(solved, micro_batches) + micro_batches * exchange_s
        else:
            solved = _solve(samples, micro_batches, kinds, most)
            found_s = kinds.slowest_s(solved, micro_batches) + micro_batches * exchange_s
        filled_s = _with_bubble(found_s, update_s, even, micro_batches)
        if filled_s < min(best_s, kept_s):
            best = Balanced(even, found_s)
            found = (solved, micro_batches)
            best_s = filled_s
        if solved.most < most and not even.in_step and not even.bubble:
            break  # no rank is limited by memory, so more micro-batches do not help
    if found is None:
        return best
    weights = tuple(map(float, kinds.of_ranks(found[0])))
    micro_batches = found[1]
    division = replace(even, weights=weights, micro_batch_size=largest_micro_batch, micro_batches=micro_batches)
    return Balanced(division, best.compute_s)


def _numbers(usual: int, even: Division, samples: int, kinds: _Kinds, largest_micro_batch: int) -> list[int]:
    """Return the micro-batch counts to try: the usual count, slightly larger counts, and the count that the fastest
    rank needs for its share. In a pipeline, also return counts in between, with smaller micro-batches."""
    if even.in_step:
        return _numbers_in_step(usual, even.turns, samples, kinds, largest_micro_batch)
    if not even.bubble and largest_micro_batch * usual >= samples:
        return [usual]
    share = _solve(samples, usual, kinds, samples).most
    if even.bubble:
        needed = count_micro_batches(share, min(even.micro_batch_size, largest_micro_batch), even.turns)
        stride = max(1, math.ceil((needed - usual) / even.turns / TRIED)) * even.turns
        return [*range(usual, needed, stride), max(usual, needed)]
    needed = count_micro_batches(share, largest_micro_batch, even.turns)
    numbers = {first + turn * even.turns for first in (usual, needed) for turn in range(1 + MORE_TURNS)}
    return sorted(number for number in numbers if number >= usual)


def _numbers_in_step(usual: int, turns: int, samples: int, kinds: _Kinds, largest_micro_batch: int) -> list[int]:
    """Return the counts to try if ranks wait for one another in each micro-batch. These include smaller counts, with
    which fast ranks get larger and slow ranks smaller micro-batches, and the counts that the faster ranks would need
    without the slow ones."""
    ranks = sum(kinds.sizes)
    fewest = count_micro_batches(math.ceil(samples / ranks), largest_micro_batch, turns)
    stride = max(1, math.ceil((usual - fewest) / turns / TRIED)) * turns
    numbers = {usual, *range(fewest, usual + MORE_TURNS * turns + 1, stride)}
    for kind in sorted(range(len(kinds.sizes)), key=lambda kind: -kinds.sample_s[kind])[:TRIED]:
        ranks -= kinds.sizes[kind]
        if ranks:
            numbers.add(count_micro_batches(math.ceil(samples / ranks), largest_micro_batch, turns))
    return sorted(numbers)


# Decide when to move layers between pipeline stages, by weighing the time saved against the cost of the change.


WORTHWHILE = 0.05
"""Layers are moved if that saves at least this fraction of the compute time. The margin is needed because the planned
times of layers are rough."""
PAUSE_STEPS = 0.5
PAUSE_S = 2.0
"""Assumed pause for a change of layout until one has been measured: a number of steps plus this many seconds. On CPUs,
changes took 0.03 to 0.08 of a step, and the first step after them took at most 0.2 of a step longer
(`tests/bench/relayout.py`). With many ranks to connect, or a GPU's allocator, they take longer."""

PipelineSpeeds = Sequence[Sequence[Speed | None]]
"""Speed of each pipeline rank, for each data-parallel rank; None while unknown."""


def expected_pause_s(step_s: float) -> float:
    """Return the assumed pause for a layout change in a run whose steps take `step_s`."""
    return PAUSE_S + PAUSE_STEPS * step_s


@dataclass(frozen=True)
class LayerChange:
    """Another layer split, and its expected effect."""

    stage_layers: Counts
    before_s: float
    """Compute time of the slowest rank in a step, before the change."""
    after_s: float
    """Expected compute time of the slowest rank after the change, with the best sample shares."""
    reason: str


class LayerScheduler:
    """Tracks the speeds of the pipeline ranks, and decides how many layers each of them gets."""

    def __init__(
        self,
        layout: Layout,
        times: LayerTimes,
        most_layers: int,
        even: Division,
        largest_micro_batch: int,
        change: float,
        patience_s: float = 0.0,
    ):
        """`times`: planned times, in any unit. `most_layers`: maximum number of layers per pipeline rank. `change`:
        ranks whose speeds differ from the median by at most this fraction are treated as equally fast. `patience_s`:
        see SkiRental."""
        self._layout = layout
        self._times = times
        self._change = change
        self._even = even
        self._largest = largest_micro_batch
        rows = [[1.0] * len(times.layers_s)] * layout.pp
        self._room = Room(rows, [float(most_layers)] * layout.pp)
        self._counts = layout.stage_layers or cut_evenly(len(times.layers_s), layout.num_stages)
        self._known: tuple[object, ...] | None = None
        self._wanted: LayerChange | None = None
        self._rental = SkiRental[Counts](patience_s)

    def note_step(
        self,
        samples: int,
        division: Division,
        speeds: PipelineSpeeds,
        remaining_steps: int,
        pause_s: float | None = None,
        steps: int = 1,
    ) -> LayerChange | None:
        """Record a step of `samples` samples with this division and these speeds. Return the change to make, once a
        SkiRental decides that it pays off. `pause_s`: measured pause of the last layout change. `steps`: number of
        steps since the last call."""
        known = samples, division, tuple(map(tuple, speeds))
        if any(speed is None for row in speeds for speed in row):
            return None
        if known != self._known:
            measured = [[speed for speed in row if speed is not None] for row in speeds]
            self._known, self._wanted = known, self._consider(samples, division, measured)
        wanted = self._wanted
        if wanted is None:
            self._rental.forget()
            return None
        saved_s = wanted.before_s - wanted.after_s
        cost_s = expected_pause_s(wanted.before_s) if pause_s is None else pause_s
        pays = self._rental.note_steps(
            wanted.stage_layers, saved_s, cost_s, steps, remaining_steps, step_s=wanted.before_s
        )
        return wanted if pays else None

    def _consider(self, samples: int, division: Division, speeds: Sequence[Sequence[Speed]]) -> LayerChange | None:
        """Return the best layer split if it is worth the change. Splits are derived from each stage's slowest rank and
        from each stage's mean."""
        before_s = compute_s(division, samples, [_slowest(row, samples) for row in speeds], 0.0)
        found: dict[Counts, float] = {}
        # A stage waits for its slowest data-parallel rank, but samples can move between these ranks, so try the mean as
        # well.
        paces = self._paces(speeds, samples)
        for of_stages in (list(map(max, paces)), list(map(mean, paces))):
            usual = median_low(of_stages)
            equalised = [1.0 if abs(pace / usual - 1) <= self._change else usual / pace for pace in of_stages]
            counts = cut_by_times(self._times, self._layout, equalised, self._room)
            if counts is not None and counts != self._counts:
                found[counts] = self._expected_s(counts, samples, speeds)
        if not found:
            return None
        best = min(found, key=lambda counts: found[counts])
        if found[best] >= before_s * (1 - WORTHWHILE):
            return None
        return LayerChange(best, before_s, found[best], self._describe(speeds, samples))

    def _paces(self, speeds: Sequence[Sequence[Speed]], samples: int) -> list[list[float]]:
        """Return the ratio of measured to planned times, indexed by pipeline rank (outer) and data-parallel rank
        (inner)."""
        planned = rank_times_s(self._times, self._counts, self._layout)
        share = samples / len(speeds)
        return [[row[rank].time_s(share, 1) / planned[rank] for row in speeds] for rank in range(self._layout.pp)]

    def _expected_s(self, counts: Counts, samples: int, speeds: Sequence[Sequence[Speed]]) -> float:
        """Return the slowest rank's time with another layer split and the best sample shares for it."""
        now, then = (rank_times_s(self._times, cut, self._layout) for cut in (self._counts, counts))
        rows = [
            _slowest([speed.scaled(new / old) for speed, old, new in zip(row, now, then, strict=True)], samples)
            for row in speeds
        ]
        return best_division(self._even, samples, rows, self._largest, 0.0).compute_s

    def _describe(self, speeds: Sequence[Sequence[Speed]], samples: int) -> str:
        paces = list(map(max, self._paces(speeds, samples)))
        usual = median_low(paces)
        odd = max(range(len(paces)), key=lambda rank: max(paces[rank] / usual, usual / paces[rank]))
        if abs(paces[odd] / usual - 1) <= self._change:
            return "the stages' measured times are less even than planned"
        return f"pipeline rank {odd} takes {paces[odd] / usual:.2g} times the usual time for its layers"


def largest_stage(layout: Layout, num_layers: int, wanted: AutoInt, fits: Callable[[Layout], bool]) -> int | None:
    """Return the largest number of layers on any pipeline rank for which `fits` is true, up to `wanted`
    (`scheduler.max_stage_layers`).

    None if no layers can move: with one pipeline rank, or with several stages per rank."""
    if layout.pp == 1 or layout.num_stages > layout.pp:
        return None
    most = num_layers - layout.pp + 1

    def all_fit(held: int) -> bool:
        others = cut_evenly(num_layers - held, layout.pp - 1)
        cuts = ((*others[:rank], held, *others[rank:]) for rank in range(layout.pp))
        return all(fits(replace(layout, stage_layers=cut)) for cut in cuts)

    usual = max(layout.stage_layers or cut_evenly(num_layers, layout.pp))
    return largest_that_fits(usual, most if wanted == AUTO else min(most, int(wanted)), all_fit)


def with_stages(layout: Layout, counts: Counts) -> Layout:
    """Return the layout with another layer split. As in the planner, a layout with an even split has no list of
    layers."""
    even = counts == cut_evenly(sum(counts), layout.num_stages)
    return replace(layout, stage_layers=None if even else counts)


def _slowest(row: Sequence[Speed], samples: int) -> Speed:
    """Return the slowest speed among the ranks of one pipeline, because all of them work on the same samples."""
    return max(row, key=lambda speed: speed.time_s(samples, 1))
