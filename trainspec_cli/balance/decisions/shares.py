"""Decide when samples are divided otherwise: what the ranks' speeds would win, against what a change costs.

The decision is a pure function of what all ranks know, so each of them makes the same one without another exchange.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median, median_low

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.balance import best_division, compute_s
from trainspec_cli.balance.decisions.ski_rental import SkiRental
from trainspec_cli.balance.decisions.speeds import Speed, StepShape, slowest
from trainspec_cli.core.printable import format_duration
from trainspec_cli.recipe.keys.layout import Layout

WORTHWHILE = 0.03
"""Samples are divided unevenly where that saves at least this fraction of the computing."""
COST_STEPS, LEAST_COST_STEPS = 1.0, 0.1
"""A change of shares costs so many steps' computing at most: batches that were read ahead are read anew, and reading
keeps up with the steps. It is taken to cost the least of it, so that speeds that are hardly known change nothing."""
RANKS_A_STEP, SHARE, RANK_S = 512, 1e-3, 1e-5
"""Speeds of more ranks are exchanged less often than every step, unless that takes no more than this share of it; those
of one rank take so long."""


@dataclass(frozen=True)
class ShareChange:
    """Another division of the samples, and what it is expected to save."""

    division: Division
    before_s: float
    """The slowest rank's computing in a step as it is."""
    after_s: float
    """As it is expected to be."""
    reason: str

    @property
    def saved_s(self) -> float:
        return self.before_s - self.after_s


class ChangeCost:
    """The cost of a change of shares to a rank, as its own steps show: the first one of a start reads its batch,
    compiles and warms up as the first one with other shares does."""

    def __init__(self) -> None:
        self.seconds = inf
        """The last such step took so much longer than the one after it; unknown before that."""
        self._shape = StepShape(0, 0)
        self._first_s = inf

    def note(self, samples: int, micro_batches: int, seconds: float) -> None:
        """Take in a step, for whose batch and computing this rank took `seconds`."""
        shape = StepShape(samples, micro_batches)
        if shape != self._shape:
            self._shape = shape
            self._first_s = seconds
        elif self._first_s < inf:
            self.seconds = max(0.0, self._first_s - seconds)
            self._first_s = inf


def cost_s(step_s: float, change_s: float) -> float:
    """Return what a change is taken to cost, where a step computes for `step_s` and a change was seen to take
    `change_s` (infinite: unknown)."""
    return min(COST_STEPS * step_s, max(LEAST_COST_STEPS * step_s, change_s))


class ShareScheduler:
    """Follows the speeds of the data-parallel ranks, step by step."""

    def __init__(
        self,
        even: Division,
        largest_micro_batch: int,
        change: float,
        *,
        keeps_micro_batches: bool = False,
        patience_s: float = 0.0,
    ):
        """`change`: ranks whose times differ from the median by no more than this fraction are equally fast.

        `keeps_micro_batches`: what a step computes depends on which samples share a micro-batch (batch norm).
        `patience_s`: as of a SkiRental.
        """
        self.division = even
        """The division in force."""
        self._even = even
        self._largest = largest_micro_batch
        self._change = change
        self._keeps = keeps_micro_batches
        self._known: tuple[int, tuple[Speed, ...]] | None = None
        self._counted: set[Speed] = set()
        """The speeds whose confirming steps have been counted."""
        self._wanted: ShareChange | None = None
        self._rental = SkiRental[Division](patience_s)

    def follow(self, division: Division) -> None:
        """Put a division in force that was decided before."""
        self.division = division
        self._known = None
        self._wanted = None
        self._rental.forget()

    def limit(self, micro_batch_size: int) -> None:
        """Let no rank hold more samples at a time from now on; the shares stay as they are, in more micro-batches."""
        self._even = _limited(self._even, micro_batch_size)
        self._largest = min(self._largest, micro_batch_size)
        self.follow(_limited(self.division, micro_batch_size))

    def note_step(
        self, samples: int, speeds: Sequence[Speed | None], exchange_s: float, steps: int = 1, change_s: float = inf
    ) -> ShareChange | None:
        """Take in that a step of so many samples was made at these speeds of the ranks (None: not known yet), and that
        each micro-batch cost `exchange_s` beside them; `steps` is how many steps ago this was called before, and
        `change_s` what a change was seen to take.

        Return the change that is to be made, which is then in force. As in the ski-rental problem, one is made once
        what was lost without it has come to what it costs: that is never more than twice the least possible.
        """
        known = samples, tuple(speed for speed in speeds if speed is not None)
        if len(known[1]) < len(speeds):
            return None
        if known != self._known:
            self._known, self._wanted = known, self._consider(*known, exchange_s)
            # The steps that have confirmed a change were as slow as those after it.
            steps += max((speed.shown_steps for speed in set(known[1]) - self._counted), default=0)
            self._counted = set(known[1])
        wanted = self._wanted
        if wanted is None:
            self._rental.forget()
            return None
        paid_s = cost_s(wanted.after_s, change_s)
        if not self._rental.note_steps(wanted.division, wanted.saved_s, paid_s, steps, step_s=wanted.before_s):
            return None
        self.follow(wanted.division)
        return wanted

    def _consider(self, samples: int, measured: Sequence[Speed], exchange_s: float) -> ShareChange | None:
        """Return the change that is worth its cost in the long run. The even division is gone back to for any gain."""
        speeds = equalise(measured, self._even.count_micro_batches(samples), samples / len(measured), self._change)
        before_s = compute_s(self.division, samples, speeds, exchange_s)
        best = best_division(self._even, samples, speeds, self._largest, exchange_s, keeps_micro_batches=self._keeps)
        enough_s = before_s if best.division == self._even else before_s * (1 - WORTHWHILE)
        if best.compute_s >= enough_s:
            return None
        return ShareChange(best.division, before_s, best.compute_s, describe_speeds(speeds))


def _limited(division: Division, micro_batch_size: int) -> Division:
    return replace(division, micro_batch_size=min(division.micro_batch_size, micro_batch_size))


def equalise(speeds: Sequence[Speed], micro_batches: int, samples: float, change: float) -> tuple[Speed, ...]:
    """Return `speeds` with the median one for all ranks that take no more than the fraction `change` longer or shorter
    than it for so many samples, or than their own noise explains."""
    times_s = [speed.time_s(samples, micro_batches) for speed in speeds]
    usual_s = median_low(times_s)
    usual = speeds[times_s.index(usual_s)]
    return tuple(
        usual
        if abs(time_s - usual_s) <= max(change * usual_s, max(speed.noise, usual.noise) * max(time_s, usual_s))
        else speed
        for speed, time_s in zip(speeds, times_s, strict=True)
    )


def reporting_interval(ranks: int, step_s: float = 0.0) -> int:
    """Return after how many steps each the speeds of so many ranks are exchanged, where steps take `step_s` (0:
    unknown)."""
    usual = 1 + ranks // RANKS_A_STEP
    return min(usual, math.ceil(ranks * RANK_S / (SHARE * step_s))) if step_s > 0 else usual


def exchange_each_s(layout: Layout, least_waited_s: float) -> float:
    """Return what each micro-batch's exchanges cost: what the rank waits in one that the others wait for, unless that
    is exchanged once a step."""
    return least_waited_s if layout.shards_parameters or layout.exchanges_every_backward else 0.0


def samples_per_s(speeds: Sequence[Speed | None]) -> float:
    """Return what ranks of these speeds compute together."""
    return sum(0.0 if speed is None else 1 / speed.per_sample_s for speed in speeds)


def group_weights(rates: Sequence[float], change: float) -> tuple[float, ...]:
    """Return the share of each replica group by the samples that it computes a second.

    Groups that differ by no more than the fraction `change` are equally fast; a rate of 0 is not known yet, and taken
    for a usual one.
    """
    known = [rate for rate in rates if rate > 0]
    usual = median(known) if known else 1.0
    filled = [rate if rate > 0 else usual for rate in rates]
    return tuple(filled) if max(filled) > min(filled) * (1 + change) else (usual,) * len(rates)


def describe_rates(groups: Sequence[int], rates: Sequence[float]) -> str:
    """`replica group 1 computes 12.5 samples a second, the median is 25`: the group that differs most."""
    usual = median(rates)
    odd = max(range(len(rates)), key=lambda place: max(rates[place] / usual, usual / rates[place]))
    if rates[odd] == usual:
        return f"all replica groups compute about {usual:.3g} samples a second"
    return f"replica group {groups[odd]} computes {rates[odd]:.3g} samples a second, the median is {usual:.3g}"


def describe_speeds(speeds: Sequence[Speed]) -> str:
    """`data-parallel rank 2 computes a sample in 41 ms, the median is 20 ms`: the rank that differs most."""
    usual_s = median_low(speed.per_sample_s for speed in speeds)
    ratios = [max(speed.per_sample_s / usual_s, usual_s / speed.per_sample_s) for speed in speeds]
    odd = ratios.index(max(ratios))
    if speeds[odd].per_sample_s == usual_s:
        return f"all ranks compute a sample in about {format_duration(usual_s)}"
    own_s = format_duration(speeds[odd].per_sample_s)
    return f"data-parallel rank {odd} computes a sample in {own_s}, the median is {format_duration(usual_s)}"


# Decide when a node is left out: what the run would win without it, against what a new start costs.
#
# These are the last steps of the scheduler's ladder: shares, layers and layout change while the run goes on, and
# leave a slow node some work. A node is left out where even that work holds the others up for longer than they would
# take to do it themselves, or where a spare node is there to replace it. The decision is a pure function of measured
# times.


WORTH_LEAVING_OUT = 0.1
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
    kept_s = min(computed_s, best_s) + rest_s
    expected_s = work * max(left_s) + rest_s
    if expected_s > kept_s * (1 - WORTH_LEAVING_OUT):
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
    inner = layout.cp * layout.tp
    rows = layout.data_parallel_size
    return [
        [(stage * rows + row) * inner + place for stage in range(layout.pp) for place in range(inner)]
        for row in range(rows)
    ]


def added_work(before: Layout, after: Layout, samples: int) -> float:
    """Return how many times as much the rank that has most computes in a step of so many samples in the layout `after`,
    beside what each has in `before` on average."""
    most = math.ceil(samples / after.data_parallel_size)
    mean = samples / before.data_parallel_size
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
