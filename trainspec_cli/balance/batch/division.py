"""Divide a step's samples among replica groups, data-parallel ranks and micro-batches, as pure functions of the
position. A step's samples follow those of the previous step, so every sample is used exactly once, regardless of
failures and of how unevenly samples are divided. Any number of samples can be divided among any number of ranks. By
default, parts differ by at most one sample; a part may be empty."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import BatchingSpec, ShrinkRule
from trainspec_cli.recipe.results.plan import Plan

ROUNDING = 1e-9
"""A share that falls short of a whole number of samples by less than this is rounded up to that number."""


@dataclass(frozen=True)
class Portion:
    """The samples of one replica group in a step."""

    start: int
    """Position of the group's first sample in the run."""
    samples: int
    step_samples: int
    """Total number of samples of all replica groups."""


@dataclass(frozen=True)
class OwnSamples:
    """The samples of one data-parallel rank in a step: a contiguous range of positions for each micro-batch."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def samples(self) -> int:
        return sum(self.sizes)

    def moved(self, positions: int) -> OwnSamples:
        """Return the same division, shifted by `positions`."""
        return OwnSamples(tuple(start + positions for start in self.starts), self.sizes)


@dataclass(frozen=True)
class Division:
    """The division of a replica group's samples among its data-parallel ranks."""

    weights: tuple[float, ...]
    """Each rank's share of the samples, in arbitrary units."""
    micro_batch_size: int
    """Maximum number of samples that a rank processes at a time."""
    turns: int = 1
    """The number of micro-batches is a multiple of this number."""
    micro_batches: int = 1
    """Minimum number of micro-batches, a multiple of `turns`."""
    in_step: bool = False
    """True if ranks wait for one another in each micro-batch. If so, all ranks process their larger micro-batches at
    the same time."""
    bubble: float = 0.0
    """Time to fill and drain the pipeline, in units of micro-batches."""

    def of_rank(self, rank: int, start: int, samples: int) -> OwnSamples:
        """Return one rank's part of the `samples` samples that start at position `start`.

        All ranks get the same number of micro-batches, because they exchange gradients and parameters in each one."""
        return _from_zero(self, samples)[rank].moved(start)

    def count_micro_batches(self, samples: int) -> int:
        return max(
            self.micro_batches, count_micro_batches(max(self.counts(samples)), self.micro_batch_size, self.turns)
        )

    def counts(self, samples: int) -> tuple[int, ...]:
        """Return the number of samples for each rank."""
        return _counts(self, samples)


@lru_cache(maxsize=8)
def _counts(division: Division, samples: int) -> tuple[int, ...]:
    return weighted_counts(samples, division.weights)


@lru_cache(maxsize=8)
def _from_zero(division: Division, samples: int) -> tuple[OwnSamples, ...]:
    return divide(division.counts(samples), division.count_micro_batches(samples), in_step=division.in_step)


def even_division(layout: Layout, micro_batch_size: int, *, keeps_micro_batches: bool) -> Division:
    """Return the split for ranks of equal speed.

    `keeps_micro_batches`: the result of a step depends on which samples share a micro-batch (batch norm), so the ranks
    together must form the same micro-batches as a single rank would."""
    in_step = waits_in_micro_batches(layout) and not keeps_micro_batches
    bubble = (layout.pp - 1) * layout.bubble_part
    return Division((1.0,) * layout.data_parallel_size, micro_batch_size, turns_of(layout), 1, in_step, bubble)


def even_division_of(plan: Plan) -> Division:
    """Return the division of `plan` among equally fast ranks."""
    keeps_micro_batches = plan.spec.model.unit == "samples"
    return even_division(plan.layout, plan.micro_batch_size, keeps_micro_batches=keeps_micro_batches)


def waits_in_micro_batches(layout: Layout) -> bool:
    """Return whether data-parallel ranks wait for one another in every micro-batch. They do if each micro-batch gathers
    parameters, reduces gradients or exchanges tokens for experts. In a pipeline they do not, because the stages
    overlap."""
    experts = layout.ep * layout.etp > layout.cp * layout.tp
    return layout.pp == 1 and (layout.shards_parameters or layout.exchanges_every_backward or experts)


def turns_of(layout: Layout) -> int:
    """Return the number that the count of micro-batches must be a multiple of: pp for interleaved schedules
    (arXiv:2104.04473, section 2.2), otherwise 1."""
    return layout.pp if layout.pipeline_schedule == "interleaved" else 1


def count_micro_batches(samples: int, micro_batch_size: float, turns: int) -> int:
    """Return the number of micro-batches of at most this size that hold a rank's samples, as a multiple of `turns`."""
    return math.ceil(max(1, math.ceil(samples / micro_batch_size)) / turns) * turns


def weighted_counts(samples: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Return integers that are proportional to `weights` and sum to `samples`. They are rounded by the
    largest-remainder method; ties go to lower ranks.

    If there are enough samples, every rank gets at least one, because the speed of an idle rank cannot be measured. The
    other ranks share the rest in proportion to their weights."""
    single = _given_one(samples, weights) if samples >= len(weights) else set()
    total = sum(weight for rank, weight in enumerate(weights) if rank not in single)
    left = samples - len(single)
    exact = [1.0 if rank in single else left * weight / total for rank, weight in enumerate(weights)]
    counts = [math.floor(part + ROUNDING) for part in exact]
    by_remainder = sorted(range(len(counts)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: samples - sum(counts)]:
        counts[rank] += 1
    return tuple(counts)


def _given_one(samples: int, weights: Sequence[float]) -> set[int]:
    """Return the ranks whose proportional share is below one sample, and which therefore get exactly one."""
    total = sum(weights)
    given = set[int]()
    for rank in sorted(range(len(weights)), key=weights.__getitem__):
        if (samples - len(given)) * weights[rank] / total + ROUNDING >= 1:
            break
        given.add(rank)
        total -= weights[rank]
    return given


def largest_that_fits(usual: int, most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest size from `usual` to `most` for which `fits` is true; `usual` is assumed to fit."""
    larger = range(usual + 1, most + 1)
    return usual + bisect_left(larger, True, key=lambda size: not fits(size))


def micro_batches_of(layout: Layout, micro_batch_size: float, samples: int) -> int:
    """Return the number of micro-batches per rank in a step of `samples`, for equally fast ranks."""
    return count_micro_batches(math.ceil(samples / layout.data_parallel_size), micro_batch_size, turns_of(layout))


def divide(counts: Sequence[int], micro_batches: int, *, in_step: bool = False) -> tuple[OwnSamples, ...]:
    """Divide `sum(counts)` samples, starting at position 0; rank i gets `counts[i]` of them. The samples that all ranks
    together process in a micro-batch are contiguous. The sizes of a rank's micro-batches differ by at most one sample.
    The same is true of the micro-batches of all ranks together, unless `in_step` is set, which places every rank's
    larger micro-batches first."""
    sizes = []
    spare_before = 0
    for count in counts:
        each, spare = divmod(count, micro_batches)
        sizes.append(tuple(each + ((turn - spare_before) % micro_batches < spare) for turn in range(micro_batches)))
        spare_before += 0 if in_step else spare
    starts: list[list[int]] = [[] for _ in counts]
    position = 0
    for turn in range(micro_batches):
        for rank, own in enumerate(sizes):
            starts[rank].append(position)
            position += own[turn]
    return tuple(OwnSamples(tuple(begun), own) for begun, own in zip(starts, sizes, strict=True))


def take_portion(
    batching: BatchingSpec, samples: int, weights: Sequence[float], replica_groups: int, position: int, rank: int
) -> Portion:
    """Return the samples of group number `rank` in the step of `samples` samples that starts at `position`. `weights`:
    the shares of the participating groups, out of `replica_groups` groups. If the batch shrinks with the number of
    groups, it keeps at least one sample per group, provided that it had that many to begin with."""
    present = len(weights)
    if batching.on_loss == "shrink":
        samples = max(min(present, samples), samples * present // replica_groups)
    counts = weighted_counts(samples, weights)
    before = [0, *accumulate(counts)]
    return Portion(position + before[rank], counts[rank], samples)


def lr_factor(rule: ShrinkRule, step_samples: int, global_batch_size: int) -> float:
    """Return the learning-rate factor for a step of `step_samples`."""
    share = step_samples / global_batch_size
    return {"linear": share, "sqrt": math.sqrt(share), "none": 1.0}[rule]
