"""The optimum on a disturbed cluster: sample shares based on the true speeds, both real-valued and in whole samples."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainspec_cli.balance.batch.division import Division, weighted_counts
from trainspec_cli.balance.cluster import Cluster, Condition, Floats
from trainspec_cli.balance.decisions.balance import solve_counts, solve_in_step
from trainspec_cli.balance.decisions.speeds import Speed

TRIED = 64
"""Maximum number of micro-batch counts to try. The best `ROUNDED` of them are solved again with whole numbers of
samples."""
ROUNDED = 4
HALVINGS = 60


@dataclass(frozen=True)
class Ideal:
    whole_s: float
    real_s: float


@dataclass(frozen=True)
class RankRows:
    """The data-parallel ranks of a replica group."""

    rows: slice
    size: int


def best_step(
    cluster: Cluster,
    condition: Condition,
    groups: Sequence[RankRows],
    samples: int,
    even: Division,
    largest_micro_batch: int,
    *,
    keeps_micro_batches: bool,
) -> Ideal:
    """Return the shortest time that the present groups need for a step of `samples`, over all possible shares and
    numbers of micro-batches of at most `largest_micro_batch` samples. `even` is each group's usual division."""
    ranks = sum(group.size for group in groups)
    _, each_s = cluster.lines(condition, even.count_micro_batches(samples // len(groups)), samples / ranks)
    rates = [float((1 / each_s[group.rows]).sum()) for group in groups]
    # samples and micro-batches
    whole = np.zeros((2, cluster.ranks))
    real = np.zeros((2, cluster.ranks))
    for group, own in zip(groups, weighted_counts(samples, rates), strict=True):
        exact = samples * rates[groups.index(group)] / sum(rates)
        usual = even.count_micro_batches(own)
        wanted = list(_numbers(own, group.size, usual, largest_micro_batch, even.turns))
        wanted = [usual] if keeps_micro_batches else wanted
        best_whole = math.inf
        best_real = math.inf
        found = [
            (number, *_in_reals(cluster, condition, group, exact, number, largest_micro_batch)) for number in wanted
        ]
        for rank, (number, seconds_s, counts) in enumerate(sorted(found, key=lambda item: item[1])):
            if seconds_s < best_real:
                best_real, real[:, group.rows] = seconds_s, (counts, np.full(group.size, number))
            if rank < ROUNDED and own <= number * largest_micro_batch * group.size:
                speeds = _speeds(cluster, condition, group, number, samples / ranks)
                if even.in_step:
                    rounded = solve_in_step(own, number, speeds, largest_micro_batch)
                else:
                    rounded = solve_counts(own, number, speeds, number * largest_micro_batch)
                taken_s = _group_s(cluster, condition, group, np.array(rounded, float), number, in_step=even.in_step)
                if taken_s < best_whole:
                    best_whole, whole[:, group.rows] = taken_s, (rounded, np.full(group.size, number))
    whole_s = cluster.seconds(condition, *whole, in_step=even.in_step).total_s
    return Ideal(whole_s, cluster.seconds(condition, *real).total_s)


def _numbers(samples: int, ranks: int, usual: int, largest: int, turns: int) -> Iterator[int]:
    """Yield micro-batch counts that are multiples of `turns`, from the smallest possible count to twice the usual
    one."""
    fewest = math.ceil(math.ceil(samples / (largest * ranks)) / turns) * turns
    most = max(2 * usual, fewest + turns)
    stride = max(1, math.ceil((most - fewest) / turns / TRIED)) * turns
    yield from range(fewest, most + 1, stride)
    if (usual - fewest) % stride and usual >= fewest:
        yield usual


def _in_reals(
    cluster: Cluster, condition: Condition, group: RankRows, samples: float, number: int, largest: int
) -> tuple[float, Floats]:
    """Return the duration of a step in seconds, and the real-valued shares for which all ranks finish at the same
    time."""
    lines = cluster.lines(condition, number, samples / group.size)
    fixed_s, each_s = (part[group.rows] for part in lines)
    low_s = float(fixed_s.min())
    high_s = float((fixed_s + number * largest * each_s).max())
    # The number of samples that ranks finish by a common time grows with that time, so the time is found by bisection.
    for _ in range(HALVINGS):
        middle_s = (low_s + high_s) / 2
        held = float(np.clip((middle_s - fixed_s) / each_s, 0, number * largest).sum())
        low_s, high_s = (low_s, middle_s) if held >= samples else (middle_s, high_s)
    counts = np.clip((high_s - fixed_s) / each_s, 0, number * largest)
    if counts.sum() < samples * (1 - 1e-9):
        return math.inf, counts  # the samples do not fit into this number of micro-batches
    return _group_s(cluster, condition, group, counts, number), counts


def _speeds(cluster: Cluster, condition: Condition, group: RankRows, number: int, samples: float) -> list[Speed]:
    lines = cluster.lines(condition, number, samples)
    fixed_s, each_s = (part[group.rows].tolist() for part in lines)
    return [Speed(fixed / number, each) for fixed, each in zip(fixed_s, each_s, strict=True)]


def _group_s(
    cluster: Cluster, condition: Condition, group: RankRows, counts: Floats, number: int, *, in_step: bool = False
) -> float:
    """Return the duration in seconds of a step of one group alone."""
    division = np.zeros((2, cluster.ranks))
    division[:, group.rows] = counts, np.full(group.size, number)
    return cluster.seconds(condition, *division, in_step=in_step).total_s
