"""The scheduler at work: every rank's speed travels with the step's own exchange, and shares change between steps.

All ranks see the same speeds and decide the same by the same function, so a directive needs no exchange of its own.
Rank 0 writes it down before it takes effect. A resumed run follows what stands there, at the same steps, and so
computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainspec_cli.balance.batch.division import Division, OwnSamples, even_division_of
from trainspec_cli.balance.decisions.moved_layers import LayerChange, LayerScheduler
from trainspec_cli.balance.decisions.shares import (
    ChangeCost,
    ShareChange,
    ShareScheduler,
    exchange_each_s,
    reporting_interval,
    samples_per_s,
)
from trainspec_cli.balance.decisions.speeds import SETTLING_S, Speed, SpeedTracker, computing_s, slowest
from trainspec_cli.engine.build.train_state import TrainState
from trainspec_cli.engine.run.scheduling.directives import Directives, largest_stage_layers, watches_speeds
from trainspec_cli.engine.run.scheduling.effects import Effects
from trainspec_cli.engine.run.step_report import SpeedFigures
from trainspec_cli.engine.run.supervisor_link import SupervisorLink
from trainspec_cli.plan.partition.problem import LayerTimes
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.decisions import DirectiveEvent


class StepScheduler:
    """Called by every rank of the replica group together."""

    def __init__(self, plan: Plan, state: TrainState, directives: Directives, group: int | None, link: SupervisorLink):
        """Learn the ranks' speeds in the layout of `plan`, which is in force; in another they have other work.

        `group`: the replica group, where there are several; their runs are not resumed to the bit, so none of their
        directives is followed again, and the supervisor learns none of their speeds.
        """
        self._group, self._directives, self._link = group, directives, link
        spec = plan.spec.scheduler
        self._mode = spec.mode if watches_speeds(plan, self._group) else "off"
        self._layout = plan.layout
        keeps_micro_batches = plan.spec.model.unit == "samples"
        self._even = even_division_of(plan)
        self._largest = largest_micro_batch(plan)
        self._shares = ShareScheduler(self._even, self._largest, spec.change, keeps_micro_batches=keeps_micro_batches)
        self._may_change = spec.may_change
        self._layers = layer_scheduler(plan, self._even, self._largest) if "layers" in spec.may_change else None
        self._total_steps = plan.total_steps
        self.decided_layers: LayerChange | None = None
        """Layers that are to move before the next step."""
        self.is_proposed = False
        """The supervisor proposes a layout that the ranks have not taken up."""
        self._rows, self._pipelines = ranks_of_data(state), ranks_of_pipelines(state)
        self._ranks, self._interval_steps = plan.group_size, reporting_interval(plan.group_size)
        self._tracker = SpeedTracker(spec.change, SETTLING_S)
        self._change_cost = ChangeCost()
        self._last_s = (0.0, 0.0)
        self.rate = 0.0
        """Samples that the replica group computes a second by its confirmed speeds, where shares of groups follow it; 0
        where they are not known."""
        self._decided: tuple[ShareChange, int] | None = None
        """The change that the next step begins with, and the samples of a step."""
        self._effects = Effects(self._directives)
        self._ahead = list[DirectiveEvent]()
        """Shares of an earlier start for steps that are now made again."""
        if self._mode != "off" and self._group is None:
            self._ahead = self._directives.shares_of_layout(len(self._even.weights), applied=self._mode == "auto")

    # Before a step

    def divide(self, step: int) -> Division:
        """Return how the samples of the step after update `step` are divided."""
        reached = [directive for directive in self._ahead if directive.step <= step]
        if reached:
            self._ahead = [directive for directive in self._ahead if directive.step > step]
            self._shares.follow(division_of(self._even, reached[-1], self._largest))
        elif self._decided is not None:
            self._give(step, *self._decided)
            self._decided = None
        return self._shares.division if self._mode == "auto" else self._even

    def limit(self, micro_batch_size: int) -> None:
        """Let no rank process more samples together from now on: memory has run out."""
        self._even = replace(self._even, micro_batch_size=min(self._even.micro_batch_size, micro_batch_size))
        self._largest = min(self._largest, micro_batch_size)
        self._shares.limit(micro_batch_size)

    def report(self, step: int) -> SpeedFigures | None:
        """Return this rank's part of the report of the step after update `step`; None where it reports none."""
        if self._mode == "off" or step % self._interval_steps:
            return None
        speed = self._tracker.estimate or Speed(0.0, 0.0)
        proposal = self._link.look(step) if self._group is None else 0
        change_s = self._change_cost.seconds
        own = speed.fixed_s, speed.per_sample_s, speed.noise
        return SpeedFigures(*own, change_s, *self._last_s, proposal, speed.shown_steps)

    # After it

    def note_step(
        self,
        step: int,
        own: OwnSamples,
        parts_s: Mapping[str, float],
        samples: int,
        reported: Sequence[SpeedFigures],
        *,
        shows_speed: bool = True,
        garbage_s: float = 0.0,
    ) -> None:
        """Take in where this rank's time of a step went, and what all ranks `reported` in it.

        `samples` are those of the replica group. On a GPU the step after it has begun. `shows_speed`: the step took no
        longer on this rank than it needs, as one does that is profiled. `garbage_s`: of its passes in which garbage was
        collected.
        """
        if self._mode == "off":
            return
        micro_batches, compute_s = len(own.sizes), parts_s["forward"] + parts_s["backward"]
        if shows_speed:
            own_s = computing_s(parts_s, garbage_s)
            self._tracker.note(own.samples, micro_batches, own_s, parts_s["exposed_comm"])
            self._change_cost.note(own.samples, micro_batches, parts_s["data_wait"] + compute_s)
        self._last_s = compute_s, parts_s["exposed_comm"] / micro_batches
        if not reported:
            return
        exchange_s = exchange_each_s(self._layout, min(one.waited_s for one in reported))
        slowest_s = max(one.last_s for one in reported)
        whole_s = sum(seconds for part, seconds in parts_s.items() if part != "checkpoint")
        counts = self._shares.division.counts(samples)
        known = [read_speed(*one[:3], one.shown_steps) for one in reported]
        settled = [speed if speed is not None and speed.is_settled else None for speed in known]
        slowest_step_s = slowest_s + micro_batches * exchange_s
        self._effects.note_step(step, slowest_step_s, whole_s, knows_speeds=None not in settled)
        speeds = [slowest([known[rank] for rank in row], n) for row, n in zip(self._rows, counts, strict=True)]
        if self._mode == "auto" and self._group is not None and "shares" in self._may_change:
            self.rate = 0.0 if None in settled else samples_per_s(speeds)
        if self._ahead or self._directives.has_layout_ahead:
            return
        self._tell(step, slowest_step_s, micro_batches, counts, settled)
        self.is_proposed = self._link.is_news(int(reported[0].proposal))
        steps, change_s = self._interval_steps, max(one.change_s for one in reported)
        self._interval_steps = reporting_interval(self._ranks, slowest_s)
        division = self._shares.division
        decides_shares = "shares" in self._may_change
        if decides_shares and (change := self._shares.note_step(samples, speeds, exchange_s, steps, change_s)):
            self._decided = change, samples
        if self._layers is not None and self._group is None:
            stages = [
                [slowest([settled[rank] for rank in ranks], n) for ranks in row]
                for row, n in zip(self._pipelines, counts, strict=True)
            ]
            left, pause_s = self._total_steps - step, self._directives.last_pause_s
            self.decided_layers = self.decided_layers or self._layers.note_step(
                samples, division, stages, left, pause_s, steps
            )

    def _tell(
        self, step: int, step_s: float, micro_batches: int, counts: Sequence[int], known: Sequence[Speed | None]
    ) -> None:
        """Let the supervisor know, which decides on what the ranks cannot."""
        if self._group is not None or not self._link.writes:
            return
        samples = [0] * self._ranks
        for row, count in zip(self._rows, counts, strict=True):
            for rank in row:
                samples[rank] = count
        self._link.tell(step, step_s, self._layout, micro_batches, samples, known)

    def _give(self, step: int, change: ShareChange, samples: int) -> None:
        division = change.division
        directive = DirectiveEvent(
            step=step,
            number=0,
            applied=self._mode == "auto",
            counts=division.counts(samples),
            micro_batch_size=division.micro_batch_size,
            micro_batches=division.count_micro_batches(samples),
            reason=change.reason,
            before_s=change.before_s,
            expected_s=change.after_s,
            group=ABSENT if self._group is None else self._group,
        )
        directive = self._directives.write(directive)
        if directive.applied:
            self._effects.watch(directive)

    def watch(self, directive: DirectiveEvent) -> None:
        """Measure what a directive of the layout has come to; it is in force."""
        self._effects.watch(directive)


def largest_micro_batch(plan: Plan) -> int:
    """Return the samples that a rank may process together: what the recipe and memory allow; where nobody knows what
    memory does, what the recipe says."""
    if plan.largest_micro_batch_size is not None:
        return plan.largest_micro_batch_size
    wanted = plan.spec.scheduler.max_micro_batch_size
    return plan.micro_batch_size if wanted == AUTO else max(plan.micro_batch_size, int(wanted))


def division_of(even: Division, directive: DirectiveEvent, largest_micro_batch: int) -> Division:
    """Return the division that a directive asks for, in as many more micro-batches as memory and schedule need now.
    Even shares stay even, of any batch."""
    assert isinstance(directive.micro_batch_size, int) and isinstance(directive.micro_batches, int)
    samples = sum(directive.counts)
    if (directive.counts, directive.micro_batches) == (even.counts(samples), even.count_micro_batches(samples)):
        return even
    return replace(
        even,
        weights=tuple(map(float, directive.counts)),
        micro_batch_size=min(directive.micro_batch_size, largest_micro_batch),
        micro_batches=math.ceil(directive.micro_batches / even.turns) * even.turns,
    )


def read_speed(fixed_s: float, per_sample_s: float, noise: float = 0.0, shown_steps: float = 0.0) -> Speed | None:
    """Return a speed as it was reported; None for a rank that does not know its own yet."""
    return Speed(fixed_s, per_sample_s, noise, int(shown_steps)) if 0 < per_sample_s < math.inf else None


def layer_scheduler(plan: Plan, even: Division, largest_micro_batch: int) -> LayerScheduler | None:
    """Return what decides on moved layers; None where none may move."""
    most = largest_stage_layers(plan)
    if most is None:
        return None
    times = LayerTimes(plan.layer_flops, 0.0, plan.head_flops)
    return LayerScheduler(plan.layout, times, most, even, largest_micro_batch, plan.spec.scheduler.change)


def ranks_of_pipelines(state: TrainState) -> list[list[list[int]]]:
    """Return for each data-parallel rank and each of its pipeline ranks the ranks that share the work of its stages."""
    mesh = state.mesh.axes.mesh  # (pp, dp_replicate, dp_shard, cp, tp)
    rows = mesh.permute(1, 2, 0, 3, 4).flatten(3).flatten(0, 1)
    return [[[int(rank) for rank in ranks] for ranks in row] for row in rows.tolist()]


def ranks_of_data(state: TrainState) -> list[list[int]]:
    """Return the ranks of each data-parallel rank: all that work on the same samples."""
    mesh = state.mesh.axes.mesh  # (pp, dp_replicate, dp_shard, cp, tp)
    rows = mesh.permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    return [[int(rank) for rank in row] for row in rows.tolist()]
