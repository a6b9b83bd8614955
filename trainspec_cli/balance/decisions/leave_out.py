"""Decide when a node is left out: what the run would win without it, against what a new start costs.

These are the last steps of the scheduler's ladder: shares, layers and layout change while the run goes on, and leave a
slow node some work. A node is left out where even that work holds the others up for longer than they would take to do
it themselves, or where a spare node is there to replace it. The decision is a pure function of measured times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.balance import best_division
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.balance.decisions.speeds import Speed, slowest
from trainspec_cli.recipe.keys.layout import Layout

WORTHWHILE = 0.1
"""A node is left out where that saves at least this fraction of a step: what the others take without it was never
measured."""


@dataclass(frozen=True)
class RankTimes:
    """The seconds that ranks compute in a step, without waiting for one another; by global rank."""

    in_force_s: tuple[float, ...]
    """Seconds of a step with the samples that each has."""
    even_s: tuple[float, ...]
    """Seconds of a step with evenly many samples."""
    paces: tuple[float, ...]
    """A rank computes so many times as long as usual for its work; 1 for what counts as usual."""


@dataclass(frozen=True)
class Gain:
    """The seconds that a run is expected to win without a node."""

    node: int
    """Its place: its ranks are those from `place` times the ranks of a node on."""
    pace: float
    """The pace of the slowest of its ranks."""
    before_s: float
    """A step takes so long as it is."""
    kept_s: float
    """A step would take so long with the node, at best."""
    expected_s: float
    """A step is expected to take so long without it."""

    @property
    def saved_s(self) -> float:
        """Return what each step saves, at least."""
        return self.kept_s - self.expected_s


def gain_without_slowest(
    times: RankTimes, ranks_per_node: int, step_s: float, best_s: float, work: float
) -> Gain | None:
    """Return what is won without the node whose slowest rank is the slowest of all; None where that is not worthwhile.

    `step_s`: what a step takes as it is. `best_s`: what the slowest rank would compute with the node, at best. `work`:
    each rank has so many times as much work without the node (1 where a spare one takes its place).

    What a step takes beside the slowest rank's computing stays as it is, and the ranks that are left keep their paces;
    the work of a node that is left out is done at the usual one.
    """
    nodes = [range(first, first + ranks_per_node) for first in range(0, len(times.paces), ranks_per_node)]
    paces = [max(times.paces[rank] for rank in ranks) for ranks in nodes]
    node = max(range(len(nodes)), key=lambda place: paces[place])
    if len(nodes) == 1 or paces[node] <= 1.0:
        return None
    usual_s = [time_s / pace for time_s, pace in zip(times.even_s, times.paces, strict=True)]
    left_s = [times.even_s[rank] if rank not in nodes[node] else usual_s[rank] for rank in range(len(usual_s))]
    computed_s = max(times.in_force_s)
    rest_s = max(0.0, step_s - computed_s)
    kept_s, expected_s = min(computed_s, best_s) + rest_s, work * max(left_s) + rest_s
    if expected_s > kept_s * (1 - WORTHWHILE):
        return None
    return Gain(node, paces[node], step_s, kept_s, expected_s)


def best_shares_s(layout: Layout, even: Division, samples: int, speeds: Sequence[Speed], largest: int) -> float:
    """Return what the slowest rank would compute in a step of `samples` with the best shares of the data-parallel
    ranks, of which none holds more than `largest` samples at a time; `speeds` are by global rank."""
    counts = even.counts(samples)
    rows = [slowest([speeds[rank] for rank in row], n) for row, n in zip(data_rows(layout), counts, strict=True)]
    known = [speed for speed in rows if speed is not None]
    return best_division(even, samples, known, largest, 0.0).compute_s


def data_rows(layout: Layout) -> list[list[int]]:
    """Return the global ranks of each data-parallel rank: those that work on the same samples. `pp` is the outermost
    axis, `cp` and `tp` are the innermost."""
    inner, rows = layout.cp * layout.tp, layout.data_parallel_size
    return [
        [(stage * rows + row) * inner + place for stage in range(layout.pp) for place in range(inner)]
        for row in range(rows)
    ]


def added_work(before: Layout, after: Layout, samples: int) -> float:
    """Return how many times as much the rank that has most computes in a step of so many samples in the layout `after`,
    beside what each has in `before` on average."""
    most, mean = math.ceil(samples / after.data_parallel_size), samples / before.data_parallel_size
    return (most / _split(after)) / (mean / _split(before))


def _split(layout: Layout) -> int:
    """Return how many ranks share the work of a sample."""
    return layout.cp * layout.tp * layout.pp


class LeaveOutScheduler:
    """Waits until leaving a node out pays: as in the ski-rental problem, once what was lost with it has come to what
    the new start costs, and where the remaining steps win that back."""

    def __init__(self) -> None:
        self._rental = SkiRental[int]()
        self._node: int | None = None

    def note_steps(self, gain: Gain | None, steps: int, remaining_steps: int, cost_s: float) -> Gain | None:
        """Take in that so many steps were made with what `gain` is expected of; return it where the node is to be left
        out now. `cost_s`: the time from a stop to the first step of the next start."""
        node = None if gain is None else gain.node
        if node != self._node:
            self._node = node
            self._rental.count_anew()
        if gain is None:
            self._rental.forget()
            return None
        pays = self._rental.note_steps(gain.node, gain.saved_s, cost_s, steps, remaining_steps)
        return gain if pays else None
