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
    return _slowest_s(division.counts(samples), division.count_micro_batches(samples), speeds, exchange_s)


def _slowest_s(counts: Sequence[int], micro_batches: int, speeds: Sequence[Speed], exchange_s: float) -> float:
    times_s = (speed.time_s(count, micro_batches) for speed, count in zip(speeds, counts, strict=True))
    return max(times_s) + micro_batches * exchange_s


def solve_counts(samples: int, micro_batches: int, speeds: Sequence[Speed], most: int) -> tuple[int, ...]:
    """Return the samples of each rank that make the slowest one fastest: exact for whole samples.

    Each rank gets one at least where there are enough, and at most `most`. Raises ValueError where these do not hold
    all samples.

    The real-valued optimum gives all ranks the same time; rounded down it is no more than one sample a rank short, and
    each of these goes to the rank that ends first with it.
    """
    if samples > most * len(speeds):
        raise ValueError(f"{samples} samples are more than {most} on each of {len(speeds)} ranks")
    least = 1 if samples >= len(speeds) else 0
    lines = [Line(micro_batches * speed.fixed_s, speed.per_sample_s) for speed in speeds]
    level_s = _common_time_s(samples, lines, most)
    counts = [min(most, max(least, int((level_s - start_s) // sample_s))) for start_s, sample_s in lines]
    missing = samples - sum(counts)
    if missing >= 0:
        _shift(counts, missing, most, 1, lambda rank: lines[rank].start_s + (counts[rank] + 1) * lines[rank].sample_s)
    else:
        _shift(counts, -missing, least, -1, lambda rank: -lines[rank].start_s - counts[rank] * lines[rank].sample_s)
    return tuple(counts)


class Line(NamedTuple):
    """A rank's time by its samples."""

    start_s: float
    sample_s: float


def _shift(counts: list[int], times: int, limit: int, change: int, key: Callable[[int], float]) -> None:
    """Change the count of the rank with the least key so many times, in place; none beyond `limit`."""
    queue = [(key(rank), rank) for rank in range(len(counts)) if counts[rank] != limit] if times else []
    heapq.heapify(queue)
    for _ in range(times):
        _, rank = heapq.heappop(queue)
        counts[rank] += change
        if counts[rank] != limit:
            heapq.heappush(queue, (key(rank), rank))


def _common_time_s(samples: int, lines: Sequence[Line], most: int) -> float:
    """Return the time in which all ranks together compute `samples`, where no rank takes less than 0 or over `most`.

    What the ranks compute grows with the time, in pieces: each round leaves out those that are at an end of their
    range, until the others' common time leaves none beyond it.
    """
    free, left = list(lines), float(samples)
    while free:
        work = sum(1 / sample_s for _, sample_s in free)
        time_s = (left + sum(start_s / sample_s for start_s, sample_s in free)) / work
        below = [line for line in free if line.start_s + most * line.sample_s >= time_s]
        if len(below) < len(free):
            left -= most * (len(free) - len(below))
            free = below
            continue
        busy = [line for line in free if line.start_s <= time_s]
        if len(busy) == len(free):
            return time_s
        free = busy
    return max(line.start_s + most * line.sample_s for line in lines)


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
    tried = [usual] if keeps_micro_batches else _numbers(usual, even, samples, speeds, largest_micro_batch)
    for micro_batches in tried:
        most = micro_batches * largest_micro_batch
        counts = solve_counts(samples, micro_batches, speeds, most)
        found_s = _slowest_s(counts, micro_batches, speeds, exchange_s)
        if found_s < min(best.compute_s, kept_s):
            weights = tuple(map(float, counts))
            best = Balanced(Division(weights, largest_micro_batch, even.turns, micro_batches), found_s)
        if max(counts) < most:
            break  # memory holds nobody back
    return best


def _numbers(usual: int, even: Division, samples: int, speeds: Sequence[Speed], largest_micro_batch: int) -> list[int]:
    """Return the numbers of micro-batches that are worth a try: the usual one, some more, and as many as the fastest
    rank needs for its share."""
    if largest_micro_batch * usual >= samples:
        return [usual]
    share = max(solve_counts(samples, usual, speeds, samples))
    needed = count_micro_batches(share, largest_micro_batch, even.turns)
    numbers = {first + turn * even.turns for first in (usual, needed) for turn in range(1 + MORE_TURNS)}
    return sorted(number for number in numbers if number >= usual)
