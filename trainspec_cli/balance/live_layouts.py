"""Layout decisions of the simulated live run: moving layers between stages, and switching to other layouts.

As in `advisor.py` and the engine, `balance.decisions` and the planner's search decide on the basis of measured speeds.
Each device is assumed to know its own compute time, excluding time spent waiting for devices that work on the same
samples: the usual time if no event slows it, otherwise its group's measured time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.cluster import LEAST_S, StepSeconds
from trainspec_cli.balance.decisions.balance import LayerChange
from trainspec_cli.balance.decisions.links import LinkPaces
from trainspec_cli.balance.decisions.other_layout import LayoutScheduler
from trainspec_cli.balance.decisions.speeds import PaceTracker, Speed
from trainspec_cli.balance.disturbance import Disturbance, Event
from trainspec_cli.balance.job import DisturbedJob, RankCounts
from trainspec_cli.balance.measured_links import MeasuredLinks
from trainspec_cli.recipe.results.forecast import SimulatedDecision
from trainspec_cli.recipe.results.plan import LayoutProposal

STEP = 0.05
"""Paces are rounded to multiples of this, because finer differences would not change the result of a search."""


class Measures(Protocol):
    """The speeds of a replica group."""

    @property
    def division(self) -> Division:
        """The current division of the group's samples."""

    def stage_speeds(self) -> list[list[Speed | None]]:
        """Return the speed of each stage (inner) of each data-parallel rank (outer)."""


@dataclass(frozen=True)
class Moved:
    """A change to another layer split or layout, which takes place before the next step."""

    job: DisturbedJob
    change: LayerChange | LayoutProposal
    pause_s: float

    def decision(self, step: int, seconds: StepSeconds) -> SimulatedDecision:
        """Return the decision, with the measured times of the step after the change."""
        change = self.change
        if isinstance(change, LayerChange):
            layers = ", ".join(map(str, change.stage_layers))
            reason = f"{change.reason}; stages of {layers} layers"
            times_s = change.before_s, change.after_s, float(seconds.computed_s.max())
            return SimulatedDecision(step, "layers", None, reason, None, None, *times_s)
        return SimulatedDecision(
            step=step,
            kind="layout",
            group=None,
            reason=change.reason,
            micro_batch_size=change.micro_batch_size,
            micro_batches=change.grad_accum_steps,
            before_s=change.before_s,
            expected_s=change.expected_s,
            achieved_s=seconds.total_s,
        )


class LiveLayouts:
    """Tracks the layout of a live run with one replica group."""

    def __init__(self, job: DisturbedJob, disturbance: Disturbance, interval: int):
        """`interval`: steps between two exchanges of the ranks' speeds."""
        self._steps = disturbance.steps
        self._events = disturbance.events
        self._interval = interval
        self._paces = PaceTracker(job.change)
        self._links = MeasuredLinks(disturbance, job.num_nodes, job.devices_per_node, job.change)
        self._pause_s: float | None = None
        """Duration of the last layout change, in seconds."""
        self._begin(job)

    def _begin(self, job: DisturbedJob) -> None:
        assert job.layouts is not None, "a run that keeps its layout has nothing to track"
        self._job = job
        self._due = deque[Moved | None]([None] * (1 + job.late_steps))
        """The changes that will take effect at the start of the next steps."""
        self._layouts = job.layouts
        self._layers = job.layouts.layer_scheduler(job)
        self._timing = LayoutScheduler()
        self._known: tuple[tuple[float, ...], LinkPaces] | None = None
        cluster = job.cluster
        self._undisturbed = cluster.condition(())
        slowed = cluster.paces(self._events) > 1
        self._waiting = (cluster.of_devices(cluster.condition(self._events).compute) > 1) & ~slowed
        """Devices that no event slows, but that wait for a slowed device."""

    def begin_step(self) -> Moved | None:
        """Return the change that takes effect at the start of this step."""
        due = self._due.popleft()
        self._due.append(None)
        if due is not None:
            self._pause_s = due.pause_s
            self._begin(due.job)
            self._links.begin()
        return due

    def measure_links(self, step: int, step_s: float, events: Sequence[Event]) -> None:
        """Record a step with these events."""
        self._links.note(step, step_s, self._interval, self._job.cluster, events)

    def note_step(self, step: int, group: Measures, taken: RankCounts, seconds: StepSeconds) -> None:
        """Record the speeds that are exchanged in a step."""
        stages = group.stage_speeds()
        speeds = [[speed for speed in row if speed is not None] for row in stages]
        if any(len(known) < len(row) for known, row in zip(speeds, stages, strict=True)):
            return
        left = self._steps - step
        step_s = seconds.total_s
        if self._layers is not None:
            samples = sum(taken.counts)
            change = self._layers.note_step(samples, group.division, stages, left, self._pause_s, self._interval)
            if change is not None:
                self._move(self._layouts.with_cut(change.stage_layers), change, step_s)
                return
        self._want(speeds, taken)
        proposal = self._timing.note_steps(self._interval, step_s, left, self._pause_s)
        if proposal is not None:
            self._move(self._layouts.with_layout(proposal), proposal, step_s)

    def _move(self, job: DisturbedJob, change: LayerChange | LayoutProposal, step_s: float) -> None:
        assert job.layouts is not None, "it may change its layout again"
        if not any(self._due):
            self._due[-1] = Moved(job, change, self._layouts.pause_s(job.layouts, step_s))

    def _want(self, speeds: Sequence[Sequence[Speed]], taken: RankCounts) -> None:
        """Search for the best layout at the current paces of devices and links, if these have changed."""
        cluster = self._job.cluster
        number = taken.micro_batches
        # Only the compute time with even sample shares shows a device's own pace. Devices that only wait for others
        # keep their usual time.
        share = sum(taken.counts) / cluster.ranks
        measured_s = np.array([[speed.time_s(share, number) for speed in row] for row in speeds]).T
        division = np.array([[share], [number]]) * np.ones(cluster.ranks)
        usual_s = cluster.seconds(self._undisturbed, *division).computed_s
        own_s = [cluster.of_devices(computed_s) for computed_s in (usual_s, measured_s)]
        times_s: list[float] = np.maximum(np.where(self._waiting, *own_s), LEAST_S).tolist()
        paces = self._paces.note(self._job.layout, times_s)
        known = tuple(round(pace / STEP) * STEP for pace in paces), self._links.paces
        if known != self._known:
            self._known = known
            self._timing.want(self._layouts.propose(*known))
