"""A disturbed run, step by step: the decisions of a live run on the times that the planner expects.

Every rank's tracker measures that rank's computing with noise, the scheduler of each replica group sees the confirmed
speeds as often as the engine exchanges them, and a change holds from the next step on, as in
`engine/run/scheduling.py`. Beside it the same steps are made with even shares, and with the best there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trainspec_cli.planner.capacity import describe_fabric, efficiency_of, largest_micro_batch, setup_of
from trainspec_cli.planner.search.auto import replica_groups_of
from trainspec_cli.planner.time.samples import step_parts
from trainspec_cli.policy.division import Division, Portion, even_division, take_portion, weighted_counts
from trainspec_cli.policy.scheduling import (
    COST_STEPS,
    ShareChange,
    ShareScheduler,
    describe_rates,
    exchange_each_s,
    group_weights,
    reporting_interval,
    samples_per_s,
)
from trainspec_cli.policy.speeds import SETTLING_S, Speed, SpeedTracker, slowest
from trainspec_cli.scheduler.cluster import Cluster, Condition, StepSeconds
from trainspec_cli.scheduler.disturbance import Disturbance, Leave, groups_of_node
from trainspec_cli.scheduler.ideal import Ideal, RankRows, best_step
from trainspec_cli.spec.field_types import AUTO
from trainspec_cli.spec.recipe.batching import BatchingSpec
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate
from trainspec_cli.spec.results.simulation import SimulatedDecision, SimulatedPace, Simulation

WORTH_TELLING = 1e-3
"""Where less than this part of the time can be won back, there is nothing to win."""


@dataclass(frozen=True)
class DisturbedJob:
    """A planned run as the simulation knows it."""

    cluster: Cluster
    layout: Layout
    """Of one replica group."""
    even: Division
    """Of one replica group, where its ranks are equally fast."""
    batching: BatchingSpec
    groups: tuple[RankRows, ...]
    largest_micro_batch: int
    change: float
    """The smallest change of a speed that is confirmed."""
    keeps_micro_batches: bool
    num_nodes: int
    devices_per_node: int

    @property
    def interval(self) -> int:
        """Steps between two exchanges of the ranks' speeds."""
        return reporting_interval(self.layout.world_size)

    def portions(self, weights: Sequence[float]) -> list[Portion]:
        """Return the samples of each group that is there."""
        total, groups = self.batching.global_batch_size, len(self.groups)
        return [take_portion(self.batching, total, weights, groups, 0, place) for place in range(len(weights))]


def describe_job(spec: RunSpec, candidate: Candidate, machine: Machine | None) -> DisturbedJob:
    """Return the job of a candidate that was planned for this spec."""
    fabric, setup = describe_fabric(spec.cluster, machine), setup_of(candidate, spec, machine)
    number, layout = replica_groups_of(spec, candidate), candidate.layout
    own = replace(layout, dp_replicate=layout.dp_replicate // number)
    size, wanted = own.data_parallel_size, spec.scheduler.max_micro_batch_size
    return DisturbedJob(
        cluster=Cluster(
            step_parts(setup, efficiency_of(spec.cluster)),
            layout,
            spec.cluster.num_nodes,
            fabric.devices_per_node,
            number,
        ),
        layout=own,
        even=even_division(own, candidate.micro_batch_size),
        batching=spec.batching,
        groups=tuple(RankRows(slice(group * size, (group + 1) * size), size) for group in range(number)),
        largest_micro_batch=largest_micro_batch(candidate, setup) if wanted == AUTO else int(wanted),
        change=spec.scheduler.change,
        keeps_micro_batches=spec.model.unit == "samples",
        num_nodes=spec.cluster.num_nodes,
        devices_per_node=fabric.devices_per_node,
    )


def simulate(job: DisturbedJob, disturbance: Disturbance, name: str) -> Simulation:
    """Run the steps of a disturbance. It was checked against the cluster (`check_cluster`)."""
    usual = _Situations(job, Disturbance()).at(1)
    drawn = disturbance.drawn(usual.even_s, job.num_nodes, job.devices_per_node)
    situations, live = _Situations(job, drawn), LiveRun(job, drawn)
    met = [situations.at(step) for step in range(1, drawn.steps + 1)]
    on_s = [live.make_step(step, situation) for step, situation in enumerate(met, 1)]
    samples = [situation.samples for situation in met]
    off = _pace([situation.even_s for situation in met], samples)
    ideal = _pace([situation.ideal.whole_s for situation in met], samples)
    real = _pace([situation.ideal.real_s for situation in met], samples)
    on = _pace(on_s, samples)
    return Simulation(
        name=name,
        description=drawn.description,
        steps=drawn.steps,
        step_s=usual.even_s,
        global_batch_size=job.batching.global_batch_size,
        data_parallel_ranks=job.cluster.ranks,
        replica_groups=len(job.groups),
        micro_batch_size=job.even.micro_batch_size,
        largest_micro_batch_size=job.largest_micro_batch,
        report_interval=job.interval,
        events=tuple(event.describe() for event in drawn.events),
        off=off,
        on=on,
        ideal=ideal,
        ideal_real=real,
        won_back=_won_back(off, on, ideal),
        won_back_of_real=_won_back(off, on, real),
        decisions=tuple(live.decisions),
    )


def _pace(seconds: Sequence[float], samples: Sequence[int]) -> SimulatedPace:
    by_step = tuple(count / taken_s for count, taken_s in zip(samples, seconds, strict=True))
    return SimulatedPace(sum(seconds), sum(samples) / sum(seconds), by_step)


def _won_back(off: SimulatedPace, on: SimulatedPace, ideal: SimulatedPace) -> float | None:
    lost_s = off.wall_s - ideal.wall_s
    return (off.wall_s - on.wall_s) / lost_s if lost_s > WORTH_TELLING * off.wall_s else None


# The steps between two changes of the disturbance


@dataclass(frozen=True)
class Situation:
    """The circumstances of a step, whoever decides."""

    condition: Condition
    present: tuple[int, ...]
    """Replica groups."""
    samples: int
    even_s: float
    ideal: Ideal


class _Situations:
    def __init__(self, job: DisturbedJob, disturbance: Disturbance):
        self._job, self._events = job, disturbance.events
        self._known: dict[tuple[int, ...], Situation] = {}

    def at(self, step: int) -> Situation:
        holding = tuple(number for number, event in enumerate(self._events) if event.holds(step))
        if holding not in self._known:
            self._known[holding] = self._describe(holding)
        return self._known[holding]

    def _describe(self, holding: Sequence[int]) -> Situation:
        job, events = self._job, [self._events[number] for number in holding]
        away = {
            group
            for event in events
            if isinstance(event, Leave)
            for group in groups_of_node(event.node, job.num_nodes, len(job.groups))
        }
        present = tuple(group for group in range(len(job.groups)) if group not in away)
        condition = job.cluster.condition(events)
        portions = job.portions((1.0,) * len(present))
        even_s = seconds_of(job, condition, present, take(portions, [job.even] * len(present))).total_s
        samples = portions[0].step_samples
        return Situation(condition, present, samples, even_s, self._ideal(condition, present, samples, even_s, holding))

    def _ideal(
        self, condition: Condition, present: Sequence[int], samples: int, even_s: float, holding: Sequence[int]
    ) -> Ideal:
        """An undisturbed run is taken to be planned well."""
        if not holding:
            return Ideal(even_s, even_s)
        job = self._job
        best = best_step(
            job.cluster,
            condition,
            [job.groups[group] for group in present],
            samples,
            job.even,
            job.largest_micro_batch,
            keeps_micro_batches=job.keeps_micro_batches,
        )
        return Ideal(min(even_s, best.whole_s), min(even_s, best.whole_s, best.real_s))


@dataclass(frozen=True)
class Taken:
    """The samples of a present group's data-parallel ranks in a step."""

    counts: tuple[int, ...]
    micro_batches: int


def take(portions: Sequence[Portion], divisions: Sequence[Division]) -> list[Taken]:
    return [
        Taken(division.counts(portion.samples), division.count_micro_batches(portion.samples))
        for portion, division in zip(portions, divisions, strict=True)
    ]


def seconds_of(job: DisturbedJob, condition: Condition, present: Sequence[int], taken: Sequence[Taken]) -> StepSeconds:
    """Return the times of a step; ranks of a group that is away process nothing."""
    counts, micro_batches = np.zeros((2, job.cluster.ranks))
    for group, own in zip(present, taken, strict=True):
        counts[job.groups[group].rows], micro_batches[job.groups[group].rows] = own.counts, own.micro_batches
    return job.cluster.seconds(condition, counts, micro_batches)


# The run that decides


class LiveGroup:
    """A replica group of the live run: its ranks' trackers, and its scheduler."""

    def __init__(self, job: DisturbedJob, group: int):
        self._job, self._rows = job, job.groups[group].rows
        stages = len(job.cluster.parts.stages)
        self.trackers = [
            [SpeedTracker(job.change, SETTLING_S) for _ in range(stages)] for _ in range(job.groups[group].size)
        ]
        self._scheduler = ShareScheduler(
            job.even, job.largest_micro_batch, job.change, keeps_micro_batches=job.keeps_micro_batches
        )
        self.division = self._scheduler.division
        """The division in force; a decision holds from the next step on."""
        self.due: ShareChange | None = None
        self.rate = 0.0

    def begin_step(self) -> ShareChange | None:
        """Return the change that this step begins with."""
        change, self.due = self.due, None
        self.division = self._scheduler.division
        return change

    def end_step(self, taken: Taken, measured_s: list[list[float]], exchanged_s: float, *, reports: bool) -> None:
        """Take in what each stage (inner) of each rank (outer) measured. The speeds that are exchanged in a step are
        those before it."""
        speeds = self._speeds(taken.counts) if reports else []
        for trackers, samples, row_s in zip(self.trackers, taken.counts, measured_s, strict=True):
            for tracker, own_s in zip(trackers, row_s, strict=True):
                tracker.note(samples, taken.micro_batches, own_s)
        if reports:
            self.rate = samples_per_s(speeds)
            each_s = exchange_each_s(self._job.layout, exchanged_s / taken.micro_batches)
            self.due = self._scheduler.note_step(sum(taken.counts), speeds, each_s, self._job.interval)

    def _speeds(self, counts: Sequence[int]) -> list[Speed | None]:
        if len(self.trackers[0]) == 1:
            return [tracker.speed for (tracker,) in self.trackers]
        return [
            slowest([tracker.speed for tracker in trackers], samples)
            for trackers, samples in zip(self.trackers, counts, strict=True)
        ]


class LiveRun:
    """The run with the scheduler."""

    def __init__(self, job: DisturbedJob, disturbance: Disturbance):
        self._job, self._noise = job, disturbance.noise
        self._random = np.random.default_rng(disturbance.seed)
        self._groups = {group: LiveGroup(job, group) for group in range(len(job.groups))}
        self._weights: tuple[float, ...] = ()
        self._present: tuple[int, ...] = tuple(self._groups)
        self._made: tuple[tuple[object, ...], list[Taken], StepSeconds] | None = None
        self.decisions: list[SimulatedDecision] = []

    def make_step(self, step: int, situation: Situation) -> float:
        """Return the seconds that the step takes."""
        job, present = self._job, situation.present
        self._welcome(present)
        portions = job.portions(self._weigh(step, situation))
        changes = {group: self._groups[group].begin_step() for group in present}
        divisions = [self._groups[group].division for group in present]
        taken, seconds = self._make(situation, portions, divisions)
        self._measure(step, present, taken, seconds)
        paid_s = 0.0
        for group, own in zip(present, taken, strict=True):
            if change := changes[group]:
                self._note(step, group, change, own, seconds)
                paid_s = max(paid_s, COST_STEPS * change.after_s)
        return seconds.total_s + paid_s

    def _welcome(self, present: tuple[int, ...]) -> None:
        """A group that comes back has been started anew: it knows no speeds."""
        for group in set(present) - set(self._present):
            self._groups[group] = LiveGroup(self._job, group)
        self._present = present

    def _weigh(self, step: int, situation: Situation) -> tuple[float, ...]:
        """Return the shares of the groups that are there, as they agree on them."""
        present = situation.present
        rates = group_weights([self._groups[group].rate for group in present], self._job.change)
        before, self._weights = self._weights, rates
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
    ) -> tuple[list[Taken], StepSeconds]:
        """Return who processes what, and the step's true times; most steps are as the one before."""
        key = (id(situation), *portions, *map(id, divisions))
        if self._made is None or self._made[0] != key:
            taken = take(portions, divisions)
            self._made = key, taken, seconds_of(self._job, situation.condition, situation.present, taken)
        return self._made[1:]

    def _measure(self, step: int, present: Sequence[int], taken: Sequence[Taken], seconds: StepSeconds) -> None:
        noise = self._random.normal(1.0, self._noise, seconds.passes_s.shape)
        measured_s = (seconds.passes_s * noise).T
        for group, own in zip(present, taken, strict=True):
            own_s = measured_s[self._job.groups[group].rows].tolist()
            reports = step % self._job.interval == 0
            self._groups[group].end_step(own, own_s, seconds.exchanged_s, reports=reports)

    def _note(self, step: int, group: int, change: ShareChange, taken: Taken, seconds: StepSeconds) -> None:
        rows, micro_batches = self._job.groups[group].rows, taken.micro_batches
        each_s = exchange_each_s(self._job.layout, seconds.exchanged_s / micro_batches)
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
                achieved_s=float(seconds.passes_s[:, rows].max()) + micro_batches * each_s,
            )
        )
