"""Divide samples over ranks of different speeds so that the slowest of them is done as early as possible."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainspec_cli.policy.division import Division, count_micro_batches
from trainspec_cli.policy.speeds import Speed

EVEN_ENOUGH = 0.02
"""An even division is kept, and gone back to, where the best one is no more than this fraction faster."""
MORE_MICRO_BATCHES = 4
"""Numbers of micro-batches that are tried: the least that memory allows, and so many turns more; and the least that
holds the fastest rank's share, with so few more."""


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
    micro_batches = division.count_micro_batches(samples)
    counts = division.counts(samples)
    slowest_s = max(speed.time_s(count, micro_batches) for speed, count in zip(speeds, counts, strict=True))
    return slowest_s + micro_batches * exchange_s


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
    level_s = _common_time_s(samples, micro_batches, speeds, most)
    counts = [min(most, max(least, math.floor(_fitting(level_s, micro_batches, speed)))) for speed in speeds]
    missing = samples - sum(counts)
    if missing >= 0:
        _shift(counts, missing, most, 1, lambda rank: speeds[rank].time_s(counts[rank] + 1, micro_batches))
    else:
        _shift(counts, -missing, least, -1, lambda rank: -speeds[rank].time_s(counts[rank], micro_batches))
    return tuple(counts)


def _shift(counts: list[int], times: int, limit: int, change: int, key: Callable[[int], float]) -> None:
    """Change the count of the rank with the least key so many times, in place; none beyond `limit`."""
    queue = [(key(rank), rank) for rank in range(len(counts)) if counts[rank] != limit]
    heapq.heapify(queue)
    for _ in range(times):
        _, rank = heapq.heappop(queue)
        counts[rank] += change
        if counts[rank] != limit:
            heapq.heappush(queue, (key(rank), rank))


def _fitting(time_s: float, micro_batches: int, speed: Speed) -> float:
    """Return the samples that a rank computes in that time."""
    return (time_s - micro_batches * speed.fixed_s) / speed.per_sample_s


def _common_time_s(samples: int, micro_batches: int, speeds: Sequence[Speed], most: int) -> float:
    """Return the time in which all ranks together compute `samples`, where no rank takes less than 0 or over `most`.

    What the ranks compute grows with the time, in pieces: each round leaves out those that are at an end of their
    range, until the others' common time leaves none beyond it.
    """
    free, left = list(speeds), float(samples)
    while free:
        work = sum(1 / speed.per_sample_s for speed in free)
        fixed = sum(micro_batches * speed.fixed_s / speed.per_sample_s for speed in free)
        time_s = (left + fixed) / work
        full = [speed for speed in free if _fitting(time_s, micro_batches, speed) > most]
        idle = [speed for speed in free if _fitting(time_s, micro_batches, speed) < 0]
        if full:
            left -= most * len(full)
            free = [speed for speed in free if _fitting(time_s, micro_batches, speed) <= most]
        elif idle:
            free = [speed for speed in free if _fitting(time_s, micro_batches, speed) >= 0]
        else:
            return time_s
    return max(speed.time_s(most, micro_batches) for speed in speeds)


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
    level_s = _common_time_s(samples, usual, speeds, samples)
    share = max(_fitting(level_s, usual, speed) for speed in speeds)
    least = [
        count_micro_batches(math.ceil(held), largest_micro_batch, even.turns) for held in (samples / len(speeds), share)
    ]
    tried = {fewest + turn * even.turns for fewest in least for turn in range(MORE_MICRO_BATCHES + 1)}
    for micro_batches in [usual] if keeps_micro_batches else sorted({usual, *tried}):
        if samples > micro_batches * largest_micro_batch * len(speeds):
            continue
        counts = solve_counts(samples, micro_batches, speeds, micro_batches * largest_micro_batch)
        weights = tuple(map(float, counts))
        uneven = replace(even, weights=weights, micro_batch_size=largest_micro_batch, micro_batches=micro_batches)
        found = Balanced(uneven, compute_s(uneven, samples, speeds, exchange_s))
        if found.compute_s < min(best.compute_s, kept_s):
            best = found
    return best
