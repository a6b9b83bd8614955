"""Simulate the live run: the decisions of `balance.decisions`, based on noisy measured times.

For every rank, a tracker measures compute times. The scheduler of each replica group reads the confirmed speeds as
often as the engine exchanges them. A change applies from the next step, as in the engine's `StepScheduler`. On
accelerators it applies one step later, because a step is recorded after the next one has been queued.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trainspec_cli.balance.batch.division import Division, Portion, weighted_counts
from trainspec_cli.balance.cluster import Condition, StepSeconds
from trainspec_cli.balance.decisions.shares import (
    COST_STEPS,
    ShareChange,
    ShareScheduler,
    describe_rates,
    exchange_each_s,
    group_weights,
    samples_per_s,
)
from trainspec_cli.balance.decisions.speeds import SETTLING_S, Speed, SpeedTracker, slowest
from trainspec_cli.balance.disturbance import Disturbance, Event, Leave
from trainspec_cli.balance.ideal import Ideal, best_step
from trainspec_cli.balance.job import DisturbedJob, RankCounts, assign_samples, seconds_of
from trainspec_cli.balance.live_layouts import LiveLayouts
from trainspec_cli.recipe.results.forecast import SimulatedDecision
from trainspec_cli.run.recovery.nodes import groups_of_node

# The conditions in each step of a disturbed run, which do not depend on decisions, and the optimum under these
# conditions.


@dataclass(frozen=True)
class Situation:
    """The conditions in a step, which do not depend on decisions."""

    events: tuple[Event, ...]
    """The events that are in effect."""
    present: tuple[int, ...]
    """The replica groups that take part."""
    samples: int
    even_s: float
    ideal: Ideal


class Situations:
    def __init__(self, job: DisturbedJob, disturbance: Disturbance):
        self._job = job
        self._events = disturbance.events
        self._known: dict[tuple[int, ...], Situation] = {}

    def at(self, step: int) -> Situation:
        holding = tuple(number for number, event in enumerate(self._events) if event.holds(step))
        if holding not in self._known:
            self._known[holding] = self._describe(holding)
        return self._known[holding]

    def _describe(self, holding: Sequence[int]) -> Situation:
        job = self._job
        events = tuple(self._events[number] for number in holding)
        away = {
            group
            for event in events
            if isinstance(event, Leave)
            for group in groups_of_node(event.node, job.num_nodes, len(job.groups))
        }
        present = tuple(group for group in range(len(job.groups)) if group not in away)
        portions = job.portions((1.0,) * len(present))
        taken = assign_samples(portions, [job.even] * len(present))
        even_s = seconds_of(job, job.cluster.condition(events), present, taken).total_s
        samples = portions[0].step_samples
        return Situation(events, present, samples, even_s, self._ideal(events, present, samples, even_s))

    def _ideal(self, events: Sequence[Event], present: Sequence[int], samples: int, even_s: float) -> Ideal:
        """Return the optimum over sample shares in the planned layout, in its best layer split, and in the best other
        layout, if that is worth a change. The plan is assumed to be good, so gains that would make another layout
        faster than an undisturbed step are not counted."""
        if not events:
            return Ideal(even_s, even_s)
        own = _best_step(self._job, events, present, samples)
        least_s = self.at(0).even_s if self._job.layouts else 0.0  # before the first step, no event is in effect
        others = [_best_step(job, events, present, samples) for job in self._others(events)]
        whole_s = min([own.whole_s, *(max(least_s, one.whole_s) for one in others)])
        real_s = min([own.real_s, *(max(least_s, one.real_s) for one in others)])
        return Ideal(min(even_s, whole_s), min(even_s, whole_s, real_s))

    def _others(self, events: Sequence[Event]) -> Iterator[DisturbedJob]:
        """Yield the job with its best layer split and in its best other layout, if they exist."""
        layouts = self._job.layouts
        cluster = self._job.cluster
        paces = cluster.paces(events).tolist()
        links = cluster.link_paces(events)
        if layouts is None or (max(paces) == min(paces) and links.is_usual):
            return
        if (counts := layouts.best_cut(paces, links)) and counts != self._job.layout.stage_layers:
            yield layouts.with_cut(counts)
        if proposal := layouts.propose(paces, links):
            yield layouts.with_layout(proposal)


def _best_step(job: DisturbedJob, events: Sequence[Event], present: Sequence[int], samples: int) -> Ideal:
    return best_step(
        job.cluster,
        job.cluster.condition(events),
        [job.groups[group] for group in present],
        samples,
        job.even,
        job.largest_micro_batch,
        keeps_micro_batches=job.keeps_micro_batches,
    )


class LiveGroup:
    """A replica group of the live run: the trackers of its ranks, and its scheduler."""

    def __init__(self, job: DisturbedJob, group: int, interval: int):
        self._job = job
        self._interval = interval
        stages = len(job.cluster.parts.stages)
        self.trackers = [
            [SpeedTracker(job.change, SETTLING_S) for _ in range(stages)] for _ in range(job.groups[group].size)
        ]
        self._scheduler = ShareScheduler(
            job.even, job.largest_micro_batch, job.change, keeps_micro_batches=job.keeps_micro_batches
        )
        self.division = self._scheduler.division
        """The current division of the group's samples."""
        self._due = deque[ShareChange | None]([None] * (1 + job.late_steps))
        """The changes that will take effect at the start of the next steps."""
        self.rate = 0.0

    def begin_step(self) -> ShareChange | None:
        """Return the change that takes effect at the start of this step."""
        change = self._due.popleft()
        if change is not None:
            self.division = change.division
        return change

    def end_step(
        self,
        taken: RankCounts,
        measured_s: list[list[float]],
        updates_s: list[list[float]],
        waited_s: float,
        *,
        reports: bool,
    ) -> None:
        """Record the pass and update times measured by each stage (inner) of each rank (outer). The speeds that are
        exchanged in a step are those from before the step. `waited_s`: exchange time of the rank that waits least."""
        stages = [[tracker.estimate for tracker in trackers] for trackers in self.trackers] if reports else []
        slowest_s = max(map(max, measured_s))
        due = None
        for trackers, samples, row_s, row_updates_s in zip(
            self.trackers, taken.counts, measured_s, updates_s, strict=True
        ):
            for tracker, own_s, update_s in zip(trackers, row_s, row_updates_s, strict=True):
                tracker.note(samples, taken.micro_batches, own_s, slowest_s - own_s + waited_s, update_s)
        if reports and self._job.shares_change:
            speeds = [slowest(row, samples) for row, samples in zip(stages, taken.counts, strict=True)]
            settled = all(speed is not None and speed.is_settled for row in stages for speed in row)
            self.rate = samples_per_s(speeds) if settled else 0.0
            each_s = exchange_each_s(self._job.layout, waited_s / taken.micro_batches)
            samples = sum(taken.counts)
            steps = self._interval
            change_s = self._job.change_s
            due = self._scheduler.note_step(samples, speeds, each_s, steps, change_s)
        self._due.append(due)

    def stage_speeds(self) -> list[list[Speed | None]]:
        """Return the settled speed of each stage (inner) of each data-parallel rank (outer)."""
        found = [[tracker.estimate for tracker in trackers] for trackers in self.trackers]
        return [[speed if speed is not None and speed.is_settled else None for speed in row] for row in found]


class LiveRun:
    """The simulated run under the live scheduler."""

    def __init__(self, job: DisturbedJob, disturbance: Disturbance, interval: int):
        """`interval`: number of steps between two exchanges of the ranks' speeds."""
        self._job = job
        self._noise = disturbance.noise
        self._interval = interval
        self._random = np.random.default_rng(disturbance.seed)
        self._groups = {group: LiveGroup(job, group, interval) for group in range(len(job.groups))}
        self._layouts = LiveLayouts(job, disturbance, interval) if job.layouts else None
        self._weights: tuple[float, ...] = ()
        self._present: tuple[int, ...] = tuple(self._groups)
        self._conditions: dict[tuple[Event, ...], Condition] = {}
        self._made: tuple[tuple[object, ...], list[RankCounts], StepSeconds] | None = None
        self.decisions: list[SimulatedDecision] = []

    def make_step(self, step: int, situation: Situation) -> float:
        """Return the duration of the step in seconds."""
        present = situation.present
        self._welcome(present)
        moved = self._layouts.begin_step() if self._layouts else None
        if moved is not None:
            self._adopt(moved.job)
        job = self._job
        portions = job.portions(self._weigh(step, situation))
        changes = {group: self._groups[group].begin_step() for group in present}
        divisions = [self._groups[group].division for group in present]
        taken, seconds = self._make(situation, portions, divisions)
        self._measure(step, situation, taken, seconds)
        paid_s = 0.0
        if moved is not None:
            self.decisions.append(moved.decision(step, seconds))
            paid_s = moved.pause_s
        for group, own in zip(present, taken, strict=True):
            if change := changes[group]:
                self._note(step, group, change, own, seconds)
                paid_s = max(paid_s, min(job.change_s, COST_STEPS * change.after_s))
        return seconds.total_s + paid_s

    def _welcome(self, present: tuple[int, ...]) -> None:
        """Start the groups that have returned. Their speeds are unknown at first."""
        for group in set(present) - set(self._present):
            self._groups[group] = LiveGroup(self._job, group, self._interval)
        self._present = present

    def _adopt(self, job: DisturbedJob) -> None:
        """Continue with another layer split or layout, in which speeds are learnt anew."""
        self._job = job
        self._groups = {0: LiveGroup(job, 0, self._interval)}
        self._conditions = {}
        self._made = None

    def _weigh(self, step: int, situation: Situation) -> tuple[float, ...]:
        """Return the sample shares on which the present groups agree."""
        present = situation.present
        rates = group_weights([self._groups[group].rate for group in present], self._job.change)
        before = self._weights
        self._weights = rates
        if len(before) == len(present):
            was, now = (weighted_counts(situation.samples, weights) for weights in (before, self._weights))
            if was != now:
                before_s, after_s = (max(n / rate for n, rate in zip(own, rates, strict=True)) for own in (was, now))
                reason = describe_rates(present, rates)
                self.decisions.append(
                    SimulatedDecision(step, "group_shares", None, reason, None, None, before_s, after_s, after_s)
                )
        return self._weights

    def _make(
        self, situation: Situation, portions: Sequence[Portion], divisions: Sequence[Division]
    ) -> tuple[list[RankCounts], StepSeconds]:
        """Return the samples of each group, and the true times of the step. The latest result is cached, because most
        steps are like the previous one."""
        key = (id(situation), *portions, *map(id, divisions))
        if self._made is None or self._made[0] != key:
            if situation.events not in self._conditions:
                self._conditions[situation.events] = self._job.cluster.condition(situation.events)
            taken = assign_samples(portions, divisions)
            condition = self._conditions[situation.events]
            self._made = key, taken, seconds_of(self._job, condition, situation.present, taken)
        return self._made[1:]

    def _measure(self, step: int, situation: Situation, taken: Sequence[RankCounts], seconds: StepSeconds) -> None:
        noise = self._random.normal(1.0, self._noise, seconds.computed_s.shape)
        measured_s = (seconds.computed_s * noise).T
        reports = step % self._interval == 0
        if self._layouts is not None:
            self._layouts.measure_links(step, seconds.total_s, situation.events)
            if reports:
                self._layouts.note_step(step, self._groups[0], taken[0], seconds)
        for group, own in zip(situation.present, taken, strict=True):
            rows = self._job.groups[group].rows
            of_ranks = measured_s[rows].tolist(), seconds.updates_s.T[rows].tolist()
            self._groups[group].end_step(own, *of_ranks, seconds.waited_s(rows), reports=reports)

    def _note(self, step: int, group: int, change: ShareChange, taken: RankCounts, seconds: StepSeconds) -> None:
        rows = self._job.groups[group].rows
        micro_batches = taken.micro_batches
        each_s = exchange_each_s(self._job.layout, seconds.waited_s(rows) / micro_batches)
        self.decisions.append(
            SimulatedDecision(
                step=step,
                kind="shares",
                group=group if len(self._job.groups) > 1 else None,
                reason=change.reason,
                micro_batch_size=change.division.micro_batch_size,
                micro_batches=micro_batches,
                before_s=change.before_s,
                expected_s=change.after_s,
                achieved_s=float((seconds.computed_s + seconds.updates_s)[:, rows].max()) + micro_batches * each_s,
            )
        )
