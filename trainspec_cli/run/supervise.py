"""The supervisor: it passes the backend's observations to `run.recovery`, executes the decisions, and ends all
processes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median

from trainspec_cli.balance.batch.division import even_division
from trainspec_cli.balance.decisions.shares import (
    Gain,
    LeaveOutScheduler,
    RankTimes,
    added_work,
    best_shares_s,
    data_rows,
    gain_without_slowest,
)
from trainspec_cli.balance.decisions.speeds import SKIPPED_STEPS, PaceTracker, Speed
from trainspec_cli.core.errors import MachineError, Problem
from trainspec_cli.core.printable import format_duration, label_node
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.records import ABSENT
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import OpenBackend, RunBackend
from trainspec_cli.run.backend.observe import newest_checkpoint, newest_step
from trainspec_cli.run.backend.processes import POLL_S
from trainspec_cli.run.channel.messages import ExpectGroups, SpeedsReport
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.accounting import read_node_failures
from trainspec_cli.run.folder.event_types.events import (
    EndedMark,
    Event,
    FailureMark,
    LaunchMark,
    MemoryEvent,
    NodeFaultEvent,
    NodeReason,
    NodesAchievedEvent,
    NodesEvent,
    RecoveryEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import EventTail, EventWriter, read_sound
from trainspec_cli.run.folder.generations import Fence, was_stop_noted
from trainspec_cli.run.folder.record import NodeErrorRecord, write_error
from trainspec_cli.run.job.folder import write_other_nodes
from trainspec_cli.run.job.job import Job, ranks_of, start_folder, torchrun_command
from trainspec_cli.run.recovery import recovery, run_state
from trainspec_cli.run.recovery.nodes import NodesAtHand, is_worth_a_restart, select_nodes
from trainspec_cli.run.recovery.reliability import repeated_faults
from trainspec_cli.run.recovery.run_state import NodeChange, NodeLost, NodeReturned, NodeSlow, NodeUnfit
from trainspec_cli.run.signals import StopRequests, on_stop_signal
from trainspec_cli.run.slurm.commands import why_down

# Select the nodes of a run's starts. A node without which the run would be faster is found by the speeds that its
# workers report (the decision itself is made in `balance.decisions.shares`); `run.recovery` acts on that and on losses.


SUPERVISOR = -1
"""The rank stated in the supervisor's events."""
MEASURED_STEPS = 5
"""Minimum number of steps for a median step time."""
REMEMBERED_STEPS = 50
ASK_AGAIN_S = 60.0
REJOIN_S = 30.0
"""A node that is not known to be lost, but does not join the next start within this many seconds, is lost, too. (It may
have died together with another one, or while the run restarted.)"""

REASONS: dict[type, NodeReason] = {
    NodeSlow: "slow", NodeLost: "lost", NodeUnfit: "unfit", NodeReturned: "returned"
}  # fmt: skip

Replan = Callable[[Plan, int], Plan | None]
"""Returns the plan of a run on the given number of nodes, or None."""


@dataclass(frozen=True)
class _Learnt:
    """The latest report of the workers."""

    report: SpeedsReport
    times: RankTimes
    best_s: float
    samples: int


class RunNodes:
    """Selects the nodes of each generation of one run, and watches for slow and returning nodes. Call `open` before
    each generation, then call `poll` repeatedly."""

    def __init__(
        self,
        job: Job,
        plan: Plan,
        replan: Replan | None,
        report: Callable[[str], None],
        mail: WorkerMail,
        executor: Executor | None = None,
    ):
        """`replan` is called in a background thread. `mail` receives the speeds reported by the workers."""
        scheduler = plan.spec.scheduler
        self._run = job.run
        self._here = job.nodes[0] if job.nodes else 0
        """The number of the node that runs this process."""
        self._full = plan
        """The plan for all nodes, to which a run with fewer nodes returns."""
        self._executor = executor or ThreadPoolExecutor(1, "fewer nodes")
        self._mode = scheduler.mode
        self._may_change = scheduler.may_change
        self._change = scheduler.change
        self._replan = replan
        self._report = report
        self._mail = mail
        self._restart_s = math.inf
        self._asked_s = math.inf
        self._asks_from_s = -math.inf
        """The earliest time to ask for a restart with a returned node."""
        self._not_enough = 0
        """Number of connected nodes for which no plan uses more of them than before."""
        self._decided: Gain | None = None
        """The expected gain from dropping the node."""
        self._given: NodesEvent | None = None
        """The directive whose effect is being measured."""
        self._number = sum(isinstance(event, NodesEvent) for event in read_sound(job.run.directives))

    def open(self, job: Job, plan: Plan | None) -> None:
        """Start a generation of the run. Its speeds and times are measured from scratch."""
        assert plan is not None, "a recipe has a plan"
        self._job = job
        self._plan = plan
        self.hostnames = ("",) * len(job.nodes)
        """Hostnames of the connected nodes, by place."""
        self._may_select = plan.replica_groups == 1 and plan.spec.resilience.mode == "restart"
        can_leave = self._may_select and plan.num_nodes > 1
        self._is_on = can_leave and self._mode != "off" and "nodes" in self._may_change
        self._planning: Future[Plan | None] | None = None
        # A lost node is noticed when nothing else is left to do, so its plan is made in advance.
        if can_leave and (self._is_on or job.survives_lost_nodes) and self._replan:
            self._planning = self._executor.submit(self._plan_fewer, self._replan, plan, plan.num_nodes - 1)
        self._events = EventTail(self._run.events(0))
        self._paces = PaceTracker(self._change)
        self._learnt: _Learnt | None = None
        self._scheduler = LeaveOutScheduler()
        self._began_s = min(time.monotonic(), self._asked_s)
        self._asked_s = math.inf
        self._step = self._steps = 0
        self._times_s = deque[float](maxlen=REMEMBERED_STEPS)

    def poll(self) -> list[NodeSlow | NodeReturned]:
        """Return the node to drop or to use from now on, if any; advice is recorded and reported. The run does not
        depend on this: if an error occurs, it is reported, and no more nodes are dropped."""
        has_fewer = self._may_select and self._plan.num_nodes < self._full.num_nodes
        if not (self._is_on or self._given or has_fewer):
            return []
        made = self._take_steps(self._events.read())
        if has_fewer and made and (returned := self._find_returned()):
            return [returned]
        try:
            report = self._mail.speeds
            is_known = self._learnt is not None and self._learnt.report is report
            if report is not None and not is_known and report.layout.world_size == self._plan.world_size:
                self._learn(report)
            if not made or not self._is_on or self._learnt is None or len(self._times_s) < MEASURED_STEPS:
                return []
            plan = self._plan_without
            gain: Gain | None = None
            if plan is not None:
                before = self._learnt.report.layout
                work = added_work(before, before if plan is self._plan else plan.layout, self._learnt.samples)
                step_s = median(self._times_s)
                best_s = self._learnt.best_s
                gain = gain_without_slowest(self._learnt.times, self._plan.devices_per_node, step_s, best_s, work)
            gain = self._scheduler.note_steps(gain, made, self._plan.total_steps - self._step, self._restart_s)
            if gain is None:
                return []
            node = self._job.nodes[gain.node]
            host = self.hostnames[gain.node]
            assert plan is not None, "a gain is known only with a plan"
            why = (
                f"{label_node(node, host)} takes {gain.pace:.1f} times as long as usual to compute; "
                f"a step takes {format_duration(gain.before_s)}, "
                f"and is expected to take {format_duration(gain.expected_s)} without it"
            )
            self._decided = gain
            slow = NodeSlow(node, host, f"{why}: the run restarts without it")
            if self._mode != "auto":
                self._write_directive(slow, plan, next(iter(self._spares), None), applied=False)
                self._report(f"advice: scheduler=auto would drop a node: {why}")
                return []
            self._asked_s = time.monotonic()
            return [slow]
        except Exception as error:  # for example a damaged file
            self._report(f"no more nodes will be dropped: {type(error).__name__}: {error}")
            self._is_on = False
            return []

    def _find_returned(self) -> NodeReturned | None:
        """Return a connected node with which it is worth restarting a run on fewer nodes than planned."""
        spares = self._spares
        now_s = time.monotonic()
        is_asked = self._asked_s < math.inf or now_s < self._asks_from_s
        if is_asked or self._plan.num_nodes + len(spares) <= max(self._not_enough, self._plan.num_nodes):
            return None
        if len(self._times_s) < MEASURED_STEPS:
            return None
        remaining_s = (self._plan.total_steps - self._step) * median(self._times_s)
        if not is_worth_a_restart(remaining_s, self._plan.num_nodes, self._restart_s):
            return None
        self._asked_s = now_s
        node, host = next(iter(spares.items()))
        return NodeReturned(node, host, f"{label_node(node, host)} is connected: the run restarts with it")

    def note_refusal(self) -> None:
        """Ask again later for a restart with a returned node, because the supervisor does not allow one now."""
        self._asked_s = math.inf
        self._asks_from_s = time.monotonic() + ASK_AGAIN_S

    def select(self, reasons: Sequence[NodeChange]) -> tuple[Job, Plan]:
        """Return the job and the plan of the next start, and record them: without the nodes that leave, and with the
        connected spares that are needed to have as many nodes as planned. If no layout fits the nodes that are left, or
        the recipe says so, the next start waits for a lost node."""
        self._take_steps(self._events.read())
        before = self._job.nodes
        number = self._plan.num_nodes
        spares = self._spares
        at_hand = NodesAtHand(before[:number], tuple(spares), self._full.num_nodes)
        response = self._plan.spec.resilience.after_node_loss
        chosen = select_nodes(at_hand, reasons, response, self._plan_for, self._here)
        joined = chosen.joined if chosen else ()
        plan = chosen.plan if chosen else None
        self._report_leaving(reasons, plan, [label_node(node, spares[node]) for node in joined])
        if chosen is None or plan is None:
            return self._job, self._plan
        dropped = {one.node for one in reasons if isinstance(one, (NodeSlow, NodeUnfit))}
        lost = {one.node for one in reasons if isinstance(one, NodeLost)} - {self._here}
        self._not_enough = chosen.not_enough
        for reason in reasons:
            event = self._write_directive(reason, plan, joined[0] if joined else None)
            self._given = event if isinstance(reason, NodeSlow) else self._given
        if plan is not self._plan:
            write_other_nodes(self._run, plan)
        nodes = order_nodes(chosen.nodes, [node for node in before if node not in dropped], lost)
        left_out = (*self._job.left_out, *sorted(dropped))
        return replace(self._job, nodes=nodes, left_out=left_out, world_size=plan.world_size), plan

    def _report_leaving(self, reasons: Sequence[NodeChange], plan: Plan | None, replacements: Sequence[str]) -> None:
        for one in reasons:
            name = label_node(one.node, one.hostname)
            if isinstance(one, NodeSlow) and plan is None:
                self._report(f"no spare node is left: the run restarts with {name}")
            if not isinstance(one, (NodeLost, NodeUnfit)):
                continue
            what = one.why if isinstance(one, NodeLost) else f"cannot take part: {one.why}"
            is_here = one.node == self._here and isinstance(one, NodeLost)
            number = plan.num_nodes if plan else None
            then = "its agent starts again" if is_here else describe_restart(number, replacements)
            self._report(f"{name} {what}; {then}")

    def _plan_for(self, nodes: int) -> Plan | None:
        """Return the plan of the run on this number of nodes; None if no layout fits."""
        for known in (self._plan, self._full):
            if nodes == known.num_nodes:
                return known
        if self._planning is not None and nodes == self._plan.num_nodes - 1:
            return self._planning.result()
        return self._plan_fewer(self._replan, self._full, nodes) if self._replan else None

    def _plan_fewer(self, replan: Replan, plan: Plan, nodes: int) -> Plan | None:
        """Return the plan of the run on fewer nodes. If the planner fails, the error is reported, and training
        continues."""
        try:
            return replan(plan, nodes)
        except Exception as error:
            self._report(f"no plan for {nodes} nodes: {type(error).__name__}: {error}")
            return None

    @property
    def _spares(self) -> dict[int, str]:
        """Return the connected nodes that the run could use in addition, with their hostnames."""
        return connected_spares(self._job, self._plan.num_nodes, self.hostnames)

    @property
    def _plan_without(self) -> Plan | None:
        """Return the plan of the run without one of its nodes; None if no layout fits or while it is still being
        computed."""
        if self._spares:
            return self._plan
        return self._planning.result() if self._planning is not None and self._planning.done() else None

    # Measure the steps

    def _take_steps(self, events: list[Event]) -> int:
        """Process the new steps, and return their number."""
        steps = [event for event in events if isinstance(event, StepEvent)]
        # The first step of a generation ends the restart, whose duration is the cost of dropping a node.
        if steps and not self._step:
            self._restart_s = time.monotonic() - self._began_s
        for event in steps:
            self._step = event.step
            self._steps = self._steps + 1
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
        """Adopt the speeds that the workers have confirmed, and start collecting step times from scratch."""
        samples = sum(report.samples[row[0]] for row in data_rows(report.layout))
        times = RankTimes(report.compute_s, report.even_s, self._paces.note(report.layout, report.even_s))
        # Best case with the node: the slowest rank's compute time with the best sample shares that the scheduler may
        # assign.
        if "shares" not in self._may_change or report.layout.data_parallel_size == 1:
            best_s = math.inf
        else:
            of_samples = self._plan.spec.model.unit == "samples"
            micro_batch = math.ceil(max(report.samples) / report.micro_batches)
            even = even_division(report.layout, micro_batch, keeps_micro_batches=of_samples)
            speeds = [Speed(*figures) for figures in zip(report.fixed_s, report.per_sample_s, strict=True)]
            largest = max(micro_batch, self._plan.largest_micro_batch_size or 0)
            best_s = best_shares_s(report.layout, even, samples, speeds, largest)
        self._learnt = _Learnt(report, times, best_s, samples)
        # Earlier step times were measured at other speeds or in another layout.
        self._times_s.clear()

    # Write the lines of directives.jsonl

    def _write_directive(
        self, reason: NodeChange, plan: Plan, spare: int | None, *, applied: bool = True
    ) -> NodesEvent:
        self._number += 1
        event = NodesEvent(
            step=self._step or newest_step(read_sound(self._run.events(0))),
            number=self._number,
            applied=applied,
            reason=REASONS[type(reason)],
            node=reason.node,
            host=reason.hostname,
            spare=ABSENT if spare is None or isinstance(reason, NodeReturned) else spare,
            num_nodes=plan.num_nodes,
            layout=plan.layout,
            cost_s=self._restart_s if math.isfinite(self._restart_s) else ABSENT,
        )
        if isinstance(reason, NodeSlow) and (gain := self._decided):
            event = replace(event, pace=gain.pace, before_s=gain.before_s, expected_s=gain.expected_s)
        self._write(event)
        return event

    def _write(self, event: NodesEvent | NodesAchievedEvent) -> None:
        directives = EventWriter(self._run.directives, SUPERVISOR)
        directives.write(event)
        directives.close()


def connected_spares(job: Job, num_nodes: int, hostnames: Sequence[str]) -> dict[int, str]:
    """Return the connected nodes that a run on `num_nodes` nodes could use in addition, with their hostnames."""
    places = range(num_nodes, len(job.nodes))
    return {job.nodes[place]: hostnames[place] for place in places if hostnames[place]}


def order_nodes(used: Sequence[int], nodes: Sequence[int], lost: set[int]) -> tuple[int, ...]:
    """Return the nodes by place: those that are used, then the spares. A lost node may return as a spare."""
    return (*used, *sorted((node for node in nodes if node not in used), key=lambda node: node in lost))


def describe_restart(num_nodes: int | None, replacements: Sequence[str]) -> str:
    """Return what follows from a loss. `num_nodes`: the number of nodes of the next start; None if it waits for the
    lost node."""
    if num_nodes is None:
        return "the run waits for it"
    nodes = f"the run restarts on {num_nodes} node{'s' if num_nodes > 1 else ''}"
    return f"{nodes}, with {', '.join(replacements)}" if replacements else nodes


class CommandNodes:
    """Selects the nodes of each start of a job without a plan, whose command runs on any of `Job.allowed_nodes`. It has
    the methods of `RunNodes`."""

    def __init__(self, job: Job, report: Callable[[str], None]):
        self._report = report
        self._asks_from_s = -math.inf
        self.open(job, None)

    def open(self, job: Job, plan: Plan | None) -> None:
        self._job = job
        self.hostnames = ("",) * len(job.nodes)

    def poll(self) -> list[NodeSlow | NodeReturned]:
        """Return a connected node for a job that runs on fewer nodes than possible."""
        spares = connected_spares(self._job, self._job.num_nodes, self.hostnames)
        now_s = time.monotonic()
        if not spares or self._job.num_nodes >= self._job.allowed_nodes[-1] or now_s < self._asks_from_s:
            return []
        self._asks_from_s = now_s + ASK_AGAIN_S
        node, host = next(iter(spares.items()))
        return [NodeReturned(node, host, f"{label_node(node, host)} is connected: the command restarts with it")]

    def note_refusal(self) -> None:
        """Nothing is to be done, because `poll` asks at intervals anyway."""

    def select(self, reasons: Sequence[NodeChange]) -> tuple[Job, None]:
        """Return the job of the next start, on as many of the connected nodes as possible. If they are too few, it
        waits for the lost ones."""
        before = self._job.nodes
        lost = {one.node for one in reasons if not isinstance(one, NodeReturned)} - {before[0]}
        own = [node for node in before[: self._job.num_nodes] if node not in lost]
        spares = connected_spares(self._job, self._job.num_nodes, self.hostnames)
        if not any(self.hostnames):  # this node has just taken over the run, and no other one has connected yet
            spares = dict.fromkeys(before[self._job.num_nodes :], "")
        found = [*own, *(node for node in spares if node not in lost)][: self._job.allowed_nodes[-1]]
        number = len(found) if len(found) in self._job.allowed_nodes else None
        taken = [label_node(node, spares[node]) for node in found if node in spares]
        for one in reasons:
            if not isinstance(one, NodeReturned):
                self._report(f"{label_node(one.node, one.hostname)} {one.why}; {describe_restart(number, taken)}")
        if number is None:
            return self._job, None
        world_size = self._job.world_size // self._job.num_nodes * number
        return replace(self._job, nodes=order_nodes(found, before, lost), num_nodes=number, world_size=world_size), None


TOOL = ResilienceSpec(mode="none")
"""The resilience settings of a job without a plan."""


@dataclass(frozen=True)
class Ending:
    """How the processes ended; `outcome.conclude` derives from this how the run ended."""

    job: Job
    """The job of the last generation."""
    exit_code: int | None
    """torchrun's exit code; None if torchrun had to be killed. It is 0 for several replica groups."""
    stop_requested: bool
    """True if a user or a scheduler has asked the supervisor, or a node's agent, to stop."""
    left_behind: tuple[int, ...] = ()
    """Ids of processes that could not be killed, because they are stuck in the kernel."""
    given_up: str = ""
    """Why the supervisor ended the run, if it did (for example because too few replica groups were left)."""
    generation: int | None = None
    """The number of the generation that ended."""


def supervise(
    job: Job,
    plan: Plan | None,
    backend: OpenBackend,
    watch: Callable[[bool], None] = lambda _: None,
    report: Callable[[str], None] = lambda _: None,
    requests: StopRequests | None = None,
    replan: Replan | None = None,
    mail: WorkerMail | None = None,
) -> Ending:
    """Run `job` until all of its processes have ended, and restart what fails as `plan` allows.

    `watch` is called about ten times per second; its argument is True if a stop was requested. `report` is called for
    every failure that does not end the run, with a message that states what happens next. Without a plan, the job is
    restarted after failures, up to `max_restarts` times; a tool's job is never restarted. `replan` finds the plan for a
    run that drops a slow node. Without `replan`, a slow node can only be replaced by a spare. `mail` passes messages
    between the workers and other code in this process.

    After a first stop request, the workers are asked to write a checkpoint and exit within the job's `stop_grace_s`. If
    they have not written an event, there is nothing to save, and they are killed. A second request kills them
    immediately.

    Raises TrainspecError if the run cannot start, or if it was restarted elsewhere."""
    requests = requests or StopRequests()
    with on_stop_signal(requests.add):
        supervisor = Supervisor(job, plan, backend, report, replan, mail)
        supervisor.open()
        try:
            while not supervisor.state.is_over:
                watch(supervisor.state.stop_requested)
                supervisor.turn(time.monotonic(), requests)
                time.sleep(POLL_S)
        finally:
            supervisor.close()
        watch(supervisor.state.stop_requested)
    return supervisor.ending()


class Supervisor:
    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        backend: OpenBackend,
        report: Callable[[str], None],
        replan: Replan | None = None,
        mail: WorkerMail | None = None,
    ):
        self._job = job
        self._plan = plan
        self._open_backend = backend
        self._report = report
        self._first_logs = job.logs
        self.state = recovery.begin(
            plan.spec.resilience if plan else TOOL,
            plan.replica_groups if plan else 1,
            job.stop_grace_s,
            max(job.earlier_steps, newest_checkpoint(job.run)),
            memory_ladder=plan.memory_ladder if plan else (),
            restarts_left=job.max_restarts,
            survives_lost_nodes=job.survives_lost_nodes,
            took_over=bool(job.lost),
        )
        self._backend: RunBackend | None = None
        self._marks: EventWriter | None = None
        self._generation: int | None = None
        self._left_behind: tuple[int, ...] = ()
        self._has_named_missing = False
        self._losses: dict[int, run_state.NodeLost | run_state.NodeUnfit] = {}
        self._mail = mail or WorkerMail()
        self._nodes: RunNodes | CommandNodes | None = None
        if plan:
            self._nodes = RunNodes(job, plan, replan, report, self._mail)
        elif job.allowed_nodes:  # a tool always runs on the same nodes
            self._nodes = CommandNodes(job, report)

    def open(self) -> None:
        """Start a generation of the run."""
        self._mail.clear()
        away = {*self._losses, *(node for node, _ in self._job.lost)}
        has_run = bool(self._job.lost) or (self._job.is_restart and self._job.survives_lost_nodes)
        self._losses.clear()
        if self._nodes:
            self._nodes.open(self._job, self._plan)
            if self._job.lost and self.state.is_alone:  # this node has taken over the run
                lost = [NodeLost(node, host, "is not connected", ()) for node, host in self._job.lost]
                job, self._plan = self._nodes.select(lost)
                self._job = replace(job, lost=())
                self._nodes.open(self._job, self._plan)
            rejoin_s: float | None = None
            own = self._job.nodes[: self._plan.num_nodes if self._plan else self._job.num_nodes]
            is_awaited = self.state.is_alone and not away.isdisjoint(own)
            if has_run and not is_awaited and self.state.resilience.after_node_loss == "continue":
                rejoin_s = max(REJOIN_S, self._plan.spec.run.node_timeout_s if self._plan else 0.0)
            self._job = replace(self._job, rejoin_s=rejoin_s)
        self._marks = EventWriter(self._job.run.supervisor_events, SUPERVISOR)
        self._marks.write(LaunchMark())
        self._backend = self._open_backend(self._job, self._plan)
        self._generation = self._backend.generation

    def close(self) -> None:
        """End an open generation, leaving none of its processes behind."""
        backend = self._backend
        marks = self._marks
        self._backend = self._marks = None
        if marks is None:
            return
        try:
            if backend:
                self._left_behind = backend.kill()
        finally:
            marks.write(EndedMark(exit_code=self._exit_code))
            marks.close()

    def turn(self, now_s: float, requests: StopRequests) -> None:
        """Process the new events, and execute the actions that follow."""
        self._handle(run_state.Tick(now_s))
        if self._backend:
            for event in self._backend.poll():
                self._handle(event)
        if self._backend and (hub := self._backend.hub):
            self._mail.speeds = hub.take_speeds() or self._mail.speeds
            for message, rank in self._mail.unsent:
                hub.send_to_workers(message, rank)
        self._mail.unsent.clear()
        for event in self._nodes.poll() if self._nodes else ():
            self._handle(event)
            if self._nodes and isinstance(event, NodeReturned) and not self.state.leaving:
                self._nodes.note_refusal()
        if requests.count:
            self._handle(run_state.StopRequested(requests.count))

    def ending(self) -> Ending:
        noted = self._generation is not None and was_stop_noted(self._job.run, self._generation)
        return Ending(
            self._job,
            self._exit_code,
            self.state.stop_requested or noted,
            self._left_behind,
            self.state.given_up,
            self._generation,
        )

    @property
    def _exit_code(self) -> int | None:
        return self.state.exit_code if self.state.is_alone else 0

    def _handle(self, event: run_state.Event) -> None:
        self._note_faults(event)
        if isinstance(event, (run_state.NodeLost, run_state.NodeUnfit)):
            self._losses[event.node] = event
        elif isinstance(event, run_state.NodeBack):
            self._losses.pop(event.node, None)
        elif isinstance(event, run_state.NodesSeen):
            if self._nodes:
                self._nodes.hostnames = event.hostnames
            if event.waiting and not self._has_named_missing and not any(group.starts for group in self.state.groups):
                self._has_named_missing = True
                self._report(event.waiting)
            elif self._has_named_missing and not event.waiting:
                self._has_named_missing = False
                self._report(f"connected nodes: {', '.join(filter(None, event.hostnames))}")
        self.state, actions = recovery.next_action(self.state, event)
        for action in actions:
            self._apply(action)

    def _note_faults(self, event: run_state.Event) -> None:
        """Record what is known about the nodes of a failure, once for each node and cause."""
        found: list[tuple[str, NodeFault]] = []
        if isinstance(event, run_state.NodeLost) and event.hostname:
            found = [(event.hostname, NodeFault("lost", event.hostname, event.why))]
        # An anticipated error, or the loss of another node, is not this node's failure.
        elif isinstance(event, run_state.GroupEnded) and not event.done and not event.foreseen:
            found = list({(one.hostname, one.fault.cause): (one.hostname, one.fault) for one in event.faults}.values())
        for host, fault in found:
            assert self._marks is not None, "a generation is open"
            self._marks.write(NodeFaultEvent(host=host, fault=fault))
            known = repeated_faults(read_node_failures(self._job.run)).get(host)
            if known and known[0] == fault.cause and self._job.survives_lost_nodes and self._plan:
                self._report(
                    f"{host} has failed {known[1]} times for the same cause ({fault.text}): it is examined before it "
                    "is used again"
                )

    def _apply(self, action: run_state.Action) -> None:
        backend = self._backend
        assert backend is not None, "a generation is open"
        match action:
            case run_state.Launch(group, number):
                backend.start(group, number)
            case run_state.Stop(group):
                backend.stop(group)
            case run_state.Kill(group):
                backend.kill(group)
            case run_state.BeginGeneration():
                self._begin_generation()
            case run_state.TakeSetting():
                # Record the setting that uses less memory, so that the next start's workers can read it.
                shortage = action.shortage
                alone = self.state.is_alone
                step = newest_step(read_sound(self._job.run.events(0)))
                directives = EventWriter(self._job.run.directives, SUPERVISOR)
                directives.write(
                    MemoryEvent(
                        step=step,
                        layout=shortage.layout,
                        failed=shortage.failed,
                        taken=action.taken,
                        restarts=True,
                        was_killed=shortage.was_killed,
                        reason=action.reason,
                        lost_steps=max(0, step - newest_checkpoint(self._job.run)) if alone else 0,
                        used_bytes=shortage.used_bytes,
                        limit_bytes=shortage.limit_bytes,
                        group=ABSENT if alone else action.group,
                    )
                )
                directives.close()
            case run_state.ChangeNodes(reasons):
                assert self._nodes is not None, "only runs on several nodes change them"
                self._job, self._plan = self._nodes.select(reasons)
            case run_state.Inform(text):
                self._report(text)
            case run_state.MarkFailure():
                assert self._marks is not None, "a generation is open"
                self._marks.write(FailureMark())
            case run_state.ArchiveErrors(group):
                assert self._plan is not None, "replica groups have a plan"
                logs = self._job.logs / start_folder(group, self.state.groups[group].starts)
                logs.mkdir(parents=True, exist_ok=True)
                for rank in ranks_of(self._plan, group):
                    path = self._job.run.error(rank)
                    if path.exists():
                        path.rename(logs / path.name)
            case run_state.RecordLosses():
                # Record the lost or unfit nodes, unless a newer start of the run has already begun with other nodes.
                run = self._job.run
                for node, event in self._losses.items():
                    if run.node_error(node).exists() or Fence(run, self._generation).is_closed():
                        continue
                    lost = isinstance(event, run_state.NodeLost)
                    slurms = why_down(event.hostname) if lost else ""
                    record = NodeErrorRecord(
                        node=node,
                        host=event.hostname,
                        message=f"{event.why}; Slurm reports: {slurms}" if slurms else event.why,
                        lost=lost,
                        time=time.time(),
                        hint="" if isinstance(event, run_state.NodeLost) else event.hint,
                    )
                    write_error(run.node_error(node), record)
            case run_state.Expect(groups):
                self._mail.send(ExpectGroups(groups))
            case run_state.Refuse(code, message, hint):
                if code == "agents_failed":
                    hint = f"read {self._job.torchrun_log}"
                raise MachineError(Problem(code, message, hint=hint, environment=True))

    def _begin_generation(self) -> None:
        run = self._job.run
        run.result_json.unlink(missing_ok=True)  # its presence would make the other nodes' agents exit
        self.close()
        # Move the failed start's error reports to its logs, and record the lost work in the run's events.
        for path in run.errors_folder.glob("*.json"):
            path.rename(self._job.logs / path.name)
        step = newest_step(read_sound(run.events(0)))
        # Without a plan, the checkpoints belong to the program; where it resumes is known only when it next starts.
        lost_steps = step - newest_checkpoint(run) if self._plan else None
        events = EventWriter(run.events(0), rank=0)
        events.write(RecoveryEvent(step=step, change="restart", group=None, stall_s=None, lost_steps=lost_steps))
        events.close()
        number = self.state.groups[0].starts + 1
        logs = self._first_logs.with_name(f"{self._first_logs.name}_start{number:03d}")
        worker = self._job.worker
        command = torchrun_command(self._job.world_size, logs, worker) if worker else self._job.command
        self._job = replace(self._job, logs=logs, command=command, is_restart=True)
        self.open()
