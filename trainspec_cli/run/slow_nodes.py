"""Finds the node that a run would be faster without, by the speeds that its workers report, and writes down what is
decided or advised. The decision itself is `balance.decisions.leave_out`; what follows it, `run.recovery`.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.decisions.leave_out import (
    Gain,
    LeaveOutScheduler,
    RankTimes,
    added_work,
    best_shares_s,
    data_rows,
    gain_without_slowest,
)
from trainspec_cli.balance.decisions.paces import PaceTracker
from trainspec_cli.balance.decisions.speeds import SKIPPED_STEPS, Speed
from trainspec_cli.core.units import format_duration
from trainspec_cli.recipe.canonical import ABSENT
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.folder.event_types.decisions import NodesAchievedEvent, NodesEvent
from trainspec_cli.run.folder.event_types.event import Event
from trainspec_cli.run.folder.event_types.training import StepEvent
from trainspec_cli.run.folder.events import EventTail, EventWriter, read_sound
from trainspec_cli.run.folder.speeds import SpeedsReport, SpeedsWatch
from trainspec_cli.run.job.folder import write_fewer_nodes
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import NodeSlow

SUPERVISOR = -1
MEASURED_STEPS = 5
"""The fewest steps over which the median of their times is taken."""
REMEMBERED_STEPS = 50

Replan = Callable[[Plan, int], Plan | None]
"""Returns the plan of a run on so many nodes; None where it has none."""


@dataclass(frozen=True)
class _Learnt:
    """The content of the workers' latest report."""

    report: SpeedsReport
    times: RankTimes
    best_s: float
    samples: int


class SlowNodes:
    """One run's, over its generations: `open` before each, then `poll` again and again."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        replan: Replan | None,
        report: Callable[[str], None],
        executor: Executor | None = None,
    ):
        """`replan` is called in a thread, which nothing waits for."""
        scheduler, self._run = plan.spec.scheduler, job.run
        self._executor = executor or ThreadPoolExecutor(1, "fewer nodes")
        self._mode, self._may_change, self._change = scheduler.mode, scheduler.may_change, scheduler.change
        self._replan, self._report = replan, report
        self._restart_s, self._asked_s = math.inf, math.inf
        self._decided: Gain | None = None
        """The gain expected of the node that is being left out."""
        self._given: NodesEvent | None = None
        """The directive whose effect is measured."""
        self._number = sum(isinstance(event, NodesEvent) for event in read_sound(job.run.directives))

    def open(self, job: Job, plan: Plan) -> None:
        """Begin a generation of the run: speeds and times are learnt anew."""
        self._job, self._plan, self._hostnames = job, plan, ("",) * len(job.nodes)
        can_leave = plan.replica_groups == 1 and plan.num_nodes > 1 and plan.spec.resilience.mode == "restart"
        self._is_on = can_leave and self._mode != "off" and "nodes" in self._may_change
        self._planning: Future[Plan | None] | None = None
        if self._is_on and self._replan:
            self._planning = self._executor.submit(self._plan_fewer, self._replan, plan)
        self._events, self._speeds = EventTail(self._run.events(0)), SpeedsWatch(self._run)
        self._paces = PaceTracker(self._change)
        self._learnt: _Learnt | None = None
        self._scheduler = LeaveOutScheduler()
        self._began_s, self._asked_s = min(time.monotonic(), self._asked_s), math.inf
        self._step = self._steps = 0
        self._times_s = deque[float](maxlen=REMEMBERED_STEPS)

    def see(self, hostnames: tuple[str, ...]) -> None:
        """Take in which nodes are there, by their places."""
        self._hostnames = hostnames

    def poll(self) -> list[NodeSlow]:
        """Return the node that is to be left out now, if any; advice is written down and reported.

        A run needs none of that to go on: where it fails, that is reported, and no node is left out.
        """
        if not (self._is_on or self._given):
            return []
        made = self._take_steps(self._events.read())
        try:
            return self._look(made)
        except Exception as error:  # of a damaged file, say
            self._report(f"no node is left out any more: {type(error).__name__}: {error}")
            self._is_on = False
            return []

    def _look(self, made: int) -> list[NodeSlow]:
        """Take in what is reported, after so many steps were made."""
        report = self._speeds.poll()
        if report is not None and report.layout.world_size == self._plan.world_size:
            self._learn(report)
        if not made or not self._is_on or self._learnt is None or len(self._times_s) < MEASURED_STEPS:
            return []
        gain = self._find_gain(self._learnt, median(self._times_s))
        gain = self._scheduler.note_steps(gain, made, self._plan.total_steps - self._step, self._restart_s)
        return [] if gain is None else self._decide(gain)

    def leave_out(self, node: int) -> tuple[Job, Plan]:
        """Return the job and the plan of the next start, which is without this node: a spare one takes its place where
        one is there, else the run goes on with fewer. Both are written down."""
        self._take_steps(self._events.read())
        spare, plan, gain = self._spare, self._plan_without, self._decided
        assert gain is not None, "that was decided here"
        if plan is None:
            self._report(f"no spare node is there any more: the run starts again with node {node}")
            return self._job, self._plan
        self._given = self._write_directive(gain, plan, applied=True)
        if spare is None:
            write_fewer_nodes(self._run, plan)
        nodes = tuple(one for one in self._job.nodes if one not in (node, spare))
        own = nodes[: self._plan.num_nodes - 1]
        nodes = (*own, *(() if spare is None else (spare,)), *nodes[len(own) :])
        job = replace(self._job, nodes=nodes, left_out=(*self._job.left_out, node), world_size=plan.world_size)
        return job, plan

    def _plan_fewer(self, replan: Replan, plan: Plan) -> Plan | None:
        """Return the plan of a run with one node less. No training ends for a fault of the planner."""
        try:
            return replan(plan, plan.num_nodes - 1)
        except Exception as error:
            self._report(f"no plan for {plan.num_nodes - 1} nodes is found: {type(error).__name__}: {error}")
            return None

    @property
    def _spare(self) -> int | None:
        """Return the number of a node that stands by; those that were left out do not count."""
        places = range(self._plan.num_nodes, len(self._job.nodes))
        return next((self._job.nodes[place] for place in places if self._hostnames[place]), None)

    @property
    def _plan_without(self) -> Plan | None:
        """Return the plan of the run without a node; None where there is none, or not yet."""
        if self._spare is not None:
            return self._plan
        return self._planning.result() if self._planning is not None and self._planning.done() else None

    # Learning

    def _take_steps(self, events: list[Event]) -> int:
        """Take in the steps that were made; return their number."""
        steps = [event for event in events if isinstance(event, StepEvent)]
        # The first step of a generation ends what the restart took: that is what leaving a node out will cost again.
        if steps and not self._step:
            self._restart_s = time.monotonic() - self._began_s
        for event in steps:
            self._step, self._steps = event.step, self._steps + 1
            if self._steps > SKIPPED_STEPS:
                self._times_s.append(event.step_time_s)
        if steps and self._given is not None and len(self._times_s) >= MEASURED_STEPS:
            achieved_s = median(self._times_s)
            self._write(
                NodesAchievedEvent(
                    step=self._step, number=self._given.number, achieved_s=achieved_s, restart_s=self._restart_s
                )
            )
            self._given = None
        return len(steps)

    def _learn(self, report: SpeedsReport) -> None:
        """Take over what the workers have confirmed; what a step takes is measured from here on."""
        samples = sum(report.samples[row[0]] for row in data_rows(report.layout))
        times = RankTimes(report.compute_s, report.even_s, self._paces.note(report.layout, report.even_s))
        self._learnt = _Learnt(report, times, self._best_s(report, samples), samples)
        # Times from before were made at other speeds or in another layout.
        self._times_s.clear()

    def _best_s(self, report: SpeedsReport, samples: int) -> float:
        """Return what the slowest rank would compute with the best shares that the scheduler may give."""
        if "shares" not in self._may_change or report.layout.data_parallel_size == 1:
            return math.inf
        of_samples = self._plan.spec.model.unit == "samples"
        micro_batch = math.ceil(max(report.samples) / report.micro_batches)
        even = even_division(report.layout, micro_batch, keeps_micro_batches=of_samples)
        speeds = [Speed(*figures) for figures in zip(report.fixed_s, report.per_sample_s, strict=True)]
        largest = max(micro_batch, self._plan.largest_micro_batch_size or 0)
        return best_shares_s(report.layout, even, samples, speeds, largest)

    # Deciding

    def _find_gain(self, learnt: _Learnt, step_s: float) -> Gain | None:
        plan = self._plan_without
        if plan is None:
            return None
        before = learnt.report.layout
        work = added_work(before, before if plan is self._plan else plan.layout, learnt.samples)
        return gain_without_slowest(learnt.times, self._plan.devices_per_node, step_s, learnt.best_s, work)

    def _decide(self, gain: Gain) -> list[NodeSlow]:
        plan, node, host = self._plan_without, self._job.nodes[gain.node], self._hostnames[gain.node]
        assert plan is not None, "there is a gain"
        name = f"node {node} ({host})" if host else f"node {node}"
        why = (
            f"{name} computes {gain.pace:.1f} times as long as usual; a step takes {format_duration(gain.before_s)}, "
            f"and {format_duration(gain.expected_s)} are expected without it"
        )
        if self._mode != "auto":
            self._write_directive(gain, plan, applied=False)
            self._report(f"advice: scheduler=auto would leave a node out: {why}")
            return []
        self._decided, self._asked_s = gain, time.monotonic()
        return [NodeSlow(node, host, f"{why}: the run starts again without it")]

    # directives.jsonl

    def _write_directive(self, gain: Gain, plan: Plan, *, applied: bool) -> NodesEvent:
        self._number += 1
        event = NodesEvent(
            step=self._step,
            number=self._number,
            applied=applied,
            node=self._job.nodes[gain.node],
            host=self._hostnames[gain.node],
            spare=ABSENT if self._spare is None else self._spare,
            num_nodes=plan.num_nodes,
            layout=plan.layout,
            pace=gain.pace,
            before_s=gain.before_s,
            expected_s=gain.expected_s,
            cost_s=self._restart_s,
        )
        self._write(event)
        return event

    def _write(self, event: NodesEvent | NodesAchievedEvent) -> None:
        directives = EventWriter(self._run.directives, SUPERVISOR)
        directives.write(event)
        directives.close()
