"""Decide when samples are divided otherwise: what the ranks' speeds would win, against what a change costs.

The decision is a pure function of what all ranks know, so each of them makes the same one without another exchange;
the planner's simulation calls it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from trainspec_cli.policy.balance import best_division, compute_s
from trainspec_cli.policy.division import Division
from trainspec_cli.policy.speeds import Speed
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.units import format_duration

WORTHWHILE = 0.03
"""A change is made where it saves at least this fraction of the computing."""
GOING_BACK = 0.005
"""To even shares, where they have become the best again, for this fraction already: the loss would go on for ever."""
UNREMARKABLE = 0.1
"""Ranks whose speeds differ from the median by less than this fraction are taken to be equally fast: of many ranks, the
noise of their measured speeds alone sets some apart."""
COST_STEPS = 1.0
"""What a change of shares costs, in steps' computing: batches that were read ahead are read anew."""
RANKS_A_STEP = 512
"""Speeds of more ranks are exchanged less often than every step."""


@dataclass(frozen=True)
class ShareChange:
    """Another division of the samples, and what it is expected to save."""

    division: Division
    before_s: float
    """The slowest rank's computing in a step as it is."""
    after_s: float
    """As it is expected to be."""
    reason: str


class ShareScheduler:
    """Follows the speeds of the data-parallel ranks, step by step."""

    def __init__(self, even: Division, largest_micro_batch: int, *, keeps_micro_batches: bool = False):
        """`keeps_micro_batches`: what a step computes depends on which samples share a micro-batch (batch norm)."""
        self.division = even
        """The division in force."""
        self._even, self._largest, self._keeps = even, largest_micro_batch, keeps_micro_batches
        self._known: tuple[int, tuple[Speed, ...]] | None = None
        self._wanted: ShareChange | None = None
        self._lost_s = 0.0

    def follow(self, division: Division) -> None:
        """Take over a division that was decided elsewhere (before the run was resumed)."""
        self.division, self._known, self._wanted = division, None, None

    def note_step(
        self, samples: int, speeds: Sequence[Speed | None], exchange_s: float, steps: int = 1
    ) -> ShareChange | None:
        """Take in a step of so many samples, made at these speeds of the ranks (None: not known yet), in which each
        micro-batch cost `exchange_s` beside them.

        `steps`: so many were made since the last one that was taken in, this one included.

        Return the change that is to be made, which is then in force. As in the ski-rental problem, one is made once
        what was lost without it has come to what it costs: that is never more than twice the least possible.
        """
        if any(speed is None for speed in speeds):
            return None
        known = samples, tuple(speed for speed in speeds if speed is not None)
        if known != self._known:
            self._known, self._wanted = known, self._consider(*known, exchange_s)
            self._lost_s = 0.0 if self._wanted is None else self._lost_s
        if self._wanted is None:
            return None
        self._lost_s += steps * (self._wanted.before_s - self._wanted.after_s)
        if self._lost_s < COST_STEPS * self._wanted.after_s:
            return None
        decided, self._lost_s = self._wanted, 0.0
        self.follow(decided.division)
        return decided

    def _consider(self, samples: int, measured: tuple[Speed, ...], exchange_s: float) -> ShareChange | None:
        speeds = without_noise(measured, samples / len(measured), self._even.count_micro_batches(samples))
        before_s = compute_s(self.division, samples, speeds, exchange_s)
        best = best_division(self._even, samples, speeds, self._largest, exchange_s, keeps_micro_batches=self._keeps)
        worthwhile = GOING_BACK if best.division == self._even else WORTHWHILE
        if best.compute_s > before_s * (1 - worthwhile):
            return None
        return ShareChange(best.division, before_s, best.compute_s, describe_speeds(speeds))


def without_noise(speeds: Sequence[Speed], samples: float, micro_batches: int) -> tuple[Speed, ...]:
    """Return the speeds, those that are not remarkable replaced by the median of all: by the time that each rank takes
    for so many samples."""
    times_s = [speed.time_s(samples, micro_batches) for speed in speeds]
    usual_s = median_low(times_s)
    usual = speeds[times_s.index(usual_s)]
    return tuple(
        usual if usual_s / (1 + UNREMARKABLE) < time_s < usual_s * (1 + UNREMARKABLE) else speed
        for speed, time_s in zip(speeds, times_s, strict=True)
    )


def reporting_interval(ranks: int) -> int:
    """Return after how many steps each the speeds of so many ranks are exchanged."""
    return 1 + ranks // RANKS_A_STEP


def exchange_each_s(layout: Layout, least_waited_s: float, micro_batches: int) -> float:
    """Return what each micro-batch's exchanges cost: of what the rank waits that the others wait for in a step, all but
    what is exchanged once."""
    every_time = layout.shards_parameters or layout.exchanges_every_backward
    return least_waited_s / micro_batches if every_time else 0.0


def samples_per_s(speeds: Sequence[Speed | None]) -> float:
    """Return what ranks of these speeds compute together."""
    return sum(0.0 if speed is None else 1 / speed.per_sample_s for speed in speeds)


def group_weights(rates: Sequence[float]) -> tuple[float, ...]:
    """Return the share of each replica group by the samples that it computes a second; equal ones where groups are
    about equally fast."""
    return tuple(rates) if max(rates) > min(rates) * (1 + UNREMARKABLE) else (1.0,) * len(rates)


def fill_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return `rates` where 0, a group whose rate is not known yet, is taken for a usual one."""
    known = [rate for rate in rates if rate > 0]
    usual = median(known) if known else 1.0
    return tuple(rate if rate > 0 else usual for rate in rates)


def describe_rates(groups: Sequence[int], rates: Sequence[float]) -> str:
    """`replica group 1 computes 12.5 samples a second, the median is 25`: the group that differs most."""
    usual = median(rates)
    odd = max(range(len(rates)), key=lambda place: max(rates[place] / usual, usual / rates[place]))
    return f"replica group {groups[odd]} computes {rates[odd]:.3g} samples a second, the median is {usual:.3g}"


def describe_speeds(speeds: Sequence[Speed]) -> str:
    """`rank 2 computes a sample in 41 ms, the ranks' median is 20 ms`: the rank that differs most."""
    usual_s = median(speed.per_sample_s for speed in speeds)
    ratios = [max(speed.per_sample_s / usual_s, usual_s / speed.per_sample_s) for speed in speeds]
    if max(ratios) - 1 < UNREMARKABLE:
        return f"all ranks compute a sample in about {format_duration(usual_s)}"
    odd = ratios.index(max(ratios))
    own_s = speeds[odd].per_sample_s
    return f"rank {odd} computes a sample in {format_duration(own_s)}, the median is {format_duration(usual_s)}"
