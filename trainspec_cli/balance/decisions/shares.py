"""Decide when to change the ranks' sample shares, by weighing the time saved against the cost of a change.

The decision is a pure function of data known to all ranks, so every rank reaches the same decision without a further
exchange."""

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
"""Samples are divided unevenly if that saves at least this fraction of the compute time."""
COST_STEPS = 1.0
"""Upper bound on the cost of changing shares, in multiples of a step's compute time. Prefetched batches must be read
again, and prefetching must get ahead of the steps again."""
LEAST_COST_STEPS = 0.1
"""Lower bound on the same cost, so that speeds measured over only a few steps do not trigger a change."""
RANKS_A_STEP = 512
"""With more ranks than this, speeds are exchanged in every step only if the exchange takes at most `SHARE` of a
step."""
SHARE = 1e-3
RANK_S = 1e-5
"""Time to exchange the speed of one rank."""


@dataclass(frozen=True)
class ShareChange:
    """Another division of the samples, and its expected effect."""

    division: Division
    before_s: float
    """Compute time of the slowest rank in a step, before the change."""
    after_s: float
    """Expected compute time of the slowest rank after the change."""
    reason: str

    @property
    def saved_s(self) -> float:
        return self.before_s - self.after_s


class ChangeCost:
    """Measures how much time a rank loses when its sample share changes. The first step after a start is also used,
    because it reads its batch, compiles and warms up, like the first step with a new share."""

    def __init__(self) -> None:
        self.seconds = inf
        """The additional time of the last such step, compared with the step after it; infinite if unknown."""
        self._shape = StepShape(0, 0)
        self._first_s = inf

    def note(self, samples: int, micro_batches: int, seconds: float) -> None:
        """Record a step where this rank took `seconds` to read its batch and compute."""
        shape = StepShape(samples, micro_batches)
        if shape != self._shape:
            self._shape = shape
            self._first_s = seconds
        elif self._first_s < inf:
            self.seconds = max(0.0, self._first_s - seconds)
            self._first_s = inf


def cost_s(step_s: float, change_s: float) -> float:
    """Return the assumed cost of a change. `step_s`: compute time of a step. `change_s`: the measured cost of a change,
    infinite if unknown."""
    return min(COST_STEPS * step_s, max(LEAST_COST_STEPS * step_s, change_s))


class ShareScheduler:
    """Tracks the speeds of the data-parallel ranks, and decides their sample shares."""

    def __init__(
        self,
        even: Division,
        largest_micro_batch: int,
        change: float,
        *,
        keeps_micro_batches: bool = False,
        patience_s: float = 0.0,
    ):
        """`change`: ranks whose times differ from the median by at most this fraction are treated as equally fast.

        `keeps_micro_batches`: the result of a step depends on which samples share a micro-batch (batch norm).
        `patience_s`: see SkiRental.
        """
        self.division = even
        """The current division of the samples."""
        self._even = even
        self._largest = largest_micro_batch
        self._change = change
        self._keeps = keeps_micro_batches
        self._known: tuple[int, tuple[Speed, ...]] | None = None
        self._counted: set[Speed] = set()
        """Speeds whose confirming steps have already been counted."""
        self._wanted: ShareChange | None = None
        self._rental = SkiRental[Division](patience_s)

    def follow(self, division: Division) -> None:
        """Apply a division that was decided earlier."""
        self.division = division
        self._known = None
        self._wanted = None
        self._rental.forget()

    def limit(self, micro_batch_size: int) -> None:
        """Limit the number of samples that a rank processes at a time. The shares stay the same, but are spread over
        more micro-batches."""
        self._even = _limited(self._even, micro_batch_size)
        self._largest = min(self._largest, micro_batch_size)
        self.follow(_limited(self.division, micro_batch_size))

    def note_step(
        self, samples: int, speeds: Sequence[Speed | None], exchange_s: float, steps: int = 1, change_s: float = inf
    ) -> ShareChange | None:
        """Record a step of `samples` samples at these rank speeds (None while unknown). Return the change to make, once
        a SkiRental decides that it pays off; the change then takes effect. `exchange_s`: time of the exchanges in each
        micro-batch. `steps`: number of steps since the last call. `change_s`: the measured cost of a change."""
        known = samples, tuple(speed for speed in speeds if speed is not None)
        if len(known[1]) < len(speeds):
            return None
        if known != self._known:
            self._known, self._wanted = known, self._consider(*known, exchange_s)
            # The steps that confirmed a change of speed were slow too, so the time lost in them counts.
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
        """Return the change that would pay off in the long run. For a return to the even division, any gain is
        enough."""
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
    """Return `speeds`, replaced by the median speed for all ranks whose time for `samples` differs from the median time
    by at most the fraction `change`, or by no more than noise explains."""
    times_s = [speed.step_s(samples, micro_batches) for speed in speeds]
    usual_s = median_low(times_s)
    usual = speeds[times_s.index(usual_s)]
    return tuple(
        usual
        if abs(time_s - usual_s) <= max(change * usual_s, max(speed.noise, usual.noise) * max(time_s, usual_s))
        else speed
        for speed, time_s in zip(speeds, times_s, strict=True)
    )


def reporting_interval(ranks: int, step_s: float = 0.0) -> int:
    """Return how many steps to take between two exchanges of the speeds of `ranks` ranks, if a step takes `step_s` (0
    if unknown)."""
    usual = 1 + ranks // RANKS_A_STEP
    return min(usual, math.ceil(ranks * RANK_S / (SHARE * step_s))) if step_s > 0 else usual


def exchange_each_s(layout: Layout, least_waited_s: float) -> float:
    """Return the time of the exchanges in a micro-batch, which is that of the rank that waits least; 0 if ranks
    exchange only once per step."""
    return least_waited_s if layout.shards_parameters or layout.exchanges_every_backward else 0.0


def counts_updates(layout: Layout, even: Division) -> bool:
    """Return whether a rank's update delays only its own next passes. Otherwise every rank waits for the slowest
    update, because the parameters are gathered next."""
    return layout.dp_shard == 1 and not even.in_step


def samples_per_s(speeds: Sequence[Speed | None]) -> float:
    """Return the total number of samples per second that ranks with these speeds process."""
    return sum(0.0 if speed is None else 1 / speed.per_sample_s for speed in speeds)


def group_weights(rates: Sequence[float], change: float) -> tuple[float, ...]:
    """Return each replica group's share of the samples, based on its samples per second. Groups that differ by at most
    the fraction `change` are treated as equally fast. A rate of 0 means unknown, and is treated as the median rate.
    """
    known = [rate for rate in rates if rate > 0]
    usual = median(known) if known else 1.0
    filled = [rate if rate > 0 else usual for rate in rates]
    return tuple(filled) if max(filled) > min(filled) * (1 + change) else (usual,) * len(rates)


def describe_rates(groups: Sequence[int], rates: Sequence[float]) -> str:
    """Describe the group that differs most: `replica group 1 processes 12.5 samples per second (median: 25)`."""
    usual = median(rates)
    odd = max(range(len(rates)), key=lambda place: max(rates[place] / usual, usual / rates[place]))
    if rates[odd] == usual:
        return f"all replica groups process about {usual:.3g} samples per second"
    return f"replica group {groups[odd]} processes {rates[odd]:.3g} samples per second (median: {usual:.3g})"


def describe_speeds(speeds: Sequence[Speed]) -> str:
    """Describe the rank that differs most: `data-parallel rank 2 takes 41 ms per sample (median: 20 ms)`."""
    usual_s = median_low(speed.per_sample_s for speed in speeds)
    ratios = [max(speed.per_sample_s / usual_s, usual_s / speed.per_sample_s) for speed in speeds]
    odd = ratios.index(max(ratios))
    if speeds[odd].per_sample_s == usual_s:
        return f"all ranks take about {format_duration(usual_s)} per sample"
    own_s = format_duration(speeds[odd].per_sample_s)
    return f"data-parallel rank {odd} takes {own_s} per sample (median: {format_duration(usual_s)})"


# Decide when to drop a node, by weighing the time saved against the cost of a restart.
#
# This is the scheduler's last resort: sample shares, layers and layouts can change without a restart, but they leave a
# slow node some work. A node is dropped if it would be faster for the other nodes to do even that work themselves, or
# if a spare node can replace it. The decision is a pure function of measured times.


WORTH_LEAVING_OUT = 0.1
"""A node is dropped if that saves at least this fraction of a step. The margin is large, because steps without the node
have not been measured."""


@dataclass(frozen=True)
class RankTimes:
    """Compute times of the ranks in a step, excluding waits, indexed by global rank."""

    in_force_s: tuple[float, ...]
    """Compute times in seconds with the current sample shares."""
    even_s: tuple[float, ...]
    """Compute times in seconds with even sample shares."""
    paces: tuple[float, ...]
    """Pace of each rank: the ratio of its time to the usual time for its work, or 1 if that is close to normal."""


@dataclass(frozen=True)
class Gain:
    """The expected gain from continuing a run without one of its nodes."""

    node: int
    """Index of the node: its first rank is this index times the number of ranks per node."""
    pace: float
    """Pace of the node's slowest rank."""
    before_s: float
    """Current duration of a step, in seconds."""
    kept_s: float
    """Duration of a step that includes the node, in the best case, in seconds."""
    expected_s: float
    """Expected duration of a step without the node, in seconds."""

    @property
    def saved_s(self) -> float:
        """Return the minimum time that each step saves, in seconds."""
        return self.kept_s - self.expected_s


def gain_without_slowest(
    times: RankTimes, ranks_per_node: int, step_s: float, best_s: float, work: float
) -> Gain | None:
    """Return the gain from dropping the node with the slowest rank; None if that is not worthwhile.

    `step_s`: current step time in seconds. `best_s`: the slowest rank's compute time in the best case that keeps the
    node. `work`: factor by which each rank's work grows without the node (1 if a spare node replaces it).

    All parts of a step except the slowest rank's compute time are assumed to stay the same. The remaining ranks keep
    their paces, and the dropped node's work is assumed to be done at the usual pace."""
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
    """Return the slowest rank's compute time in a step of `samples` with the best sample shares, with at most `largest`
    samples per rank at a time. `speeds` are indexed by global rank."""
    counts = even.counts(samples)
    rows = [slowest([speeds[rank] for rank in row], n) for row, n in zip(data_rows(layout), counts, strict=True)]
    known = [speed for speed in rows if speed is not None]
    return best_division(even, samples, known, largest, 0.0).compute_s


def data_rows(layout: Layout) -> list[list[int]]:
    """Return, for each data-parallel rank, the global ranks that work on its samples. `pp` is the outermost axis, and
    `cp` and `tp` are the innermost."""
    inner = layout.cp * layout.tp
    rows = layout.data_parallel_size
    return [
        [(stage * rows + row) * inner + place for stage in range(layout.pp) for place in range(inner)]
        for row in range(rows)
    ]


def added_work(before: Layout, after: Layout, samples: int) -> float:
    """Return the largest amount of work of any rank in layout `after`, divided by the mean in layout `before`, for a
    step of `samples`."""
    most = math.ceil(samples / after.data_parallel_size)
    mean = samples / before.data_parallel_size
    return (most / _split(after)) / (mean / _split(before))


def _split(layout: Layout) -> int:
    """Return the number of ranks that share the work on a sample."""
    return layout.cp * layout.tp * layout.pp


class LeaveOutScheduler:
    """Decides when dropping a node pays off. As in the ski-rental problem, that is when the time lost by keeping the
    node equals the cost of a restart, provided that the remaining steps recover that cost."""

    def __init__(self) -> None:
        self._rental = SkiRental[int]()
        self._node: int | None = None

    def note_steps(self, gain: Gain | None, steps: int, remaining_steps: int, cost_s: float) -> Gain | None:
        """Record `steps` steps during which `gain` was expected from dropping a node. Return the gain if the node
        should be dropped now. `cost_s`: time from stopping to the first step after the restart."""
        node = None if gain is None else gain.node
        if node != self._node:
            self._node = node
            self._rental.count_anew()
        if gain is None:
            self._rental.forget()
            return None
        pays = self._rental.note_steps(gain.node, gain.saved_s, cost_s, steps, remaining_steps)
        return gain if pays else None
