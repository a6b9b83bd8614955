"""Divide samples over ranks of different speeds so that the slowest of them is done as early as possible."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trainspec_cli.policy.division import Division, count_micro_batches
from trainspec_cli.policy.speeds import Speed

EVEN_ENOUGH = 0.02
"""An even division is kept, and gone back to, where the best one is no more than this fraction faster."""
MORE_TURNS = 4
"""Where memory does not hold a fast rank's share in the usual number of micro-batches, so many turns more are tried."""


@dataclass(frozen=True)
class Balanced:
    """A division and what it is expected to take."""

    division: Division
    compute_s: float
    """The slowest rank's own computing in a step, and the exchanges of all micro-batches."""


def compute_s(division: Division, samples: int, speeds: Sequence[Speed], exchange_s: float) -> float:
    """Return the time that the slowest rank computes in a step of `samples`, with the exchanges of micro-batches.

    `exchange_s` is what the ranks exchange for each micro-batch (the gathering of sharded parameters, say).
    """
    counts, micro_batches = division.counts(samples), division.count_micro_batches(samples)
    times_s = (speed.time_s(count, micro_batches) for speed, count in zip(speeds, counts, strict=True))
    return max(times_s) + micro_batches * exchange_s


def solve_counts(samples: int, micro_batches: int, speeds: Sequence[Speed], most: int) -> tuple[int, ...]:
    """Return the samples of each rank that make the slowest one fastest: exact for whole samples.

    Each rank gets one at least where there are enough, and at most `most`. Raises ValueError where these do not hold
    all samples.

    The real-valued optimum gives all ranks the same time; rounded down it is no more than one sample a rank short, and
    each of these goes to the rank that ends first with it.
    """
    kinds = _Kinds.of(speeds)
    return kinds.of_ranks(_solve(samples, micro_batches, kinds, most))


class _Solved(NamedTuple):
    """The samples of each rank of a kind; the first `ahead` ranks of the kind `odd` have one more."""

    counts: list[int]
    odd: int
    ahead: int

    @property
    def most(self) -> int:
        return max(max(self.counts), self.counts[self.odd] + (self.ahead > 0))


class _Kinds(NamedTuple):
    """Ranks by their speeds, of which thousands of ranks have few."""

    fixed_s: list[float]
    sample_s: list[float]
    ranks: list[list[int]]
    sizes: list[int]

    @classmethod
    def of(cls, speeds: Sequence[Speed]) -> _Kinds:
        found: dict[tuple[float, float], list[int]] = {}
        for rank, speed in enumerate(speeds):
            found.setdefault((speed.fixed_s, speed.per_sample_s), []).append(rank)
        fixed_s, sample_s = zip(*found, strict=True)
        ranks = list(found.values())
        return cls(list(fixed_s), list(sample_s), ranks, list(map(len, ranks)))

    def of_ranks(self, solved: _Solved) -> tuple[int, ...]:
        """Return the count of each rank."""
        counts = [0] * sum(self.sizes)
        for ranks, count in zip(self.ranks, solved.counts, strict=True):
            for rank in ranks:
                counts[rank] = count
        for rank in self.ranks[solved.odd][: solved.ahead]:
            counts[rank] += 1
        return tuple(counts)

    def slowest_s(self, solved: _Solved, micro_batches: int) -> float:
        """Return when the last rank ends."""
        each = zip(self.fixed_s, self.sample_s, solved.counts, strict=True)
        last_s = max(micro_batches * fixed_s + count * sample_s for fixed_s, sample_s, count in each)
        fixed_s, sample_s, count = self.fixed_s[solved.odd], self.sample_s[solved.odd], solved.counts[solved.odd]
        return max(last_s, micro_batches * fixed_s + (count + (solved.ahead > 0)) * sample_s)


def _solve(samples: int, micro_batches: int, kinds: _Kinds, most: int) -> _Solved:
    """Return what `solve_counts` does, by kinds."""
    ranks = sum(kinds.sizes)
    if samples > most * ranks:
        raise ValueError(f"{samples} samples are more than {most} on each of {ranks} ranks")
    least = 1 if samples >= ranks else 0
    lines = [
        _Line(micro_batches * fixed_s, sample_s, size)
        for fixed_s, sample_s, size in zip(kinds.fixed_s, kinds.sample_s, kinds.sizes, strict=True)
    ]
    level_s = _common_time_s(samples, lines, most)
    counts = [min(most, max(least, int((level_s - start_s) // sample_s))) for start_s, sample_s, _ in lines]
    missing = samples - sum(count * size for count, size in zip(counts, kinds.sizes, strict=True))
    if missing >= 0:
        return _shift(counts, kinds.sizes, missing, most, 1, lambda n: lines[n].end_s(counts[n] + 1))
    return _shift(counts, kinds.sizes, -missing, least, -1, lambda n: -lines[n].end_s(counts[n]))


class _Line(NamedTuple):
    """The time of a kind's ranks by their samples."""

    start_s: float
    sample_s: float
    ranks: int

    def end_s(self, samples: int) -> float:
        return self.start_s + samples * self.sample_s


def _shift(
    counts: list[int], sizes: Sequence[int], samples: int, limit: int, change: int, key: Callable[[int], float]
) -> _Solved:
    """Change the counts by so many samples together, each of a rank with the least key; none beyond `limit`."""
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
    """Return the time in which all ranks together compute `samples`, where no rank takes less than 0 or over `most`.

    What the ranks compute grows with the time, in pieces: each round leaves out those that are at an end of their
    range, until the others' common time leaves none beyond it.
    """
    free, left = list(lines), float(samples)
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
    """Return the fastest division of `samples` over ranks of these speeds, of which none holds more than
    `largest_micro_batch` samples at a time; the even one where another is hardly faster.

    `exchange_s`: as of `compute_s`. `keeps_micro_batches`: their number stays as it is.
    """
    best = Balanced(even, compute_s(even, samples, speeds, exchange_s))
    kept_s = best.compute_s * (1 - EVEN_ENOUGH)
    usual = even.count_micro_batches(samples)
    kinds, found = _Kinds.of(speeds), None
    tried = [usual] if keeps_micro_batches else _numbers(usual, even, samples, kinds, largest_micro_batch)
    for micro_batches in tried:
        most = micro_batches * largest_micro_batch
        solved = _solve(samples, micro_batches, kinds, most)
        found_s = kinds.slowest_s(solved, micro_batches) + micro_batches * exchange_s
        if found_s < min(best.compute_s, kept_s):
            best, found = Balanced(even, found_s), (solved, micro_batches)
        if solved.most < most:
            break  # memory holds nobody back
    if found is None:
        return best
    weights, micro_batches = tuple(map(float, kinds.of_ranks(found[0]))), found[1]
    return Balanced(Division(weights, largest_micro_batch, even.turns, micro_batches), best.compute_s)


def _numbers(usual: int, even: Division, samples: int, kinds: _Kinds, largest_micro_batch: int) -> list[int]:
    """Return the numbers of micro-batches that are worth a try: the usual one, some more, and as many as the fastest
    rank needs for its share."""
    if largest_micro_batch * usual >= samples:
        return [usual]
    share = _solve(samples, usual, kinds, samples).most
    needed = count_micro_batches(share, largest_micro_batch, even.turns)
    numbers = {first + turn * even.turns for first in (usual, needed) for turn in range(1 + MORE_TURNS)}
    return sorted(number for number in numbers if number >= usual)
