"""Simulate a run as events: failures occur, the job restarts or shrinks and heals, and time is lost.

Failures are a Poisson process with the same rate for all nodes, and also occur while the job is down. Checkpoints
between two events are computed directly, so the cost of a simulation depends only on the number of failures: two weeks
on 16,384 devices take a few milliseconds per seed. What follows a failure is decided as in a real job: for one replica
group by `run.recovery.nodes.SimulatedSupervisor`, for several by `run.recovery.next_action`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery import recovery, reliability, run_state
from trainspec_cli.run.recovery.nodes import NodesDecision, SimulatedSupervisor, Source, groups_of_node

MAX_FAILURES = 1000
"""A simulation stops after this many failures, when its goodput is known to within one percent."""
ENOUGH_OF_MANY = 100
"""The limit for each of many simulations. Fewer failures suffice, because the failure rates are more uncertain than the
cost of a failure: for Llama 3 405B on 16,384 H100, goodput is within 0.6% of that with 1,000 failures (1.4% with
replica groups)."""
NORMAL_90 = 1.645
"""Number of standard deviations on either side of the mean that contain 90% of a normal distribution."""


@dataclass(frozen=True)
class SimulatedJob:
    """A simulated run. Work is measured in seconds of undisturbed training."""

    work_s: float
    step_time_s: float
    devices: int
    replica_groups: int
    interval_s: float
    """Amount of work between checkpoints."""
    blocked_s: float
    """Time that a checkpoint blocks training."""
    written_s: float
    """Time from the start of a checkpoint until it is complete."""
    state_bytes_per_device: float
    load_s: float
    nodes: int = 0
    """Number of nodes; 0 means one for each replica group."""
    speed_on: Callable[[int], float | None] = lambda nodes: None
    """Returns the relative speed of the run on fewer nodes; None if no layout fits. Not called for all nodes."""
    copy_interval_s: float = math.inf
    """Amount of work between copies in the nodes' memory."""
    copy_s: float = 0.0
    """Time that such a copy blocks training."""

    @property
    def num_nodes(self) -> int:
        return self.nodes or self.replica_groups


class FailureAt(NamedTuple):
    at_s: float
    node: int
    """Place of the node among the run's nodes; if the run does not use it at that time, nothing happens."""
    group: int | None = None
    """The replica group of which a process fails, while the node remains. None: the node is lost."""


@dataclass(frozen=True)
class SimulatedRun:
    """Time of a simulated run in seconds: `kept_s` and the parts of `lost_s` sum to `wall_s`."""

    wall_s: float
    kept_s: float
    lost_s: Mapping[str, float]
    failures: int
    pause_s: float = 0.0
    """Time from the last failure until the run took steps again."""

    @property
    def goodput(self) -> float:
        return self.kept_s / self.wall_s if self.wall_s else 1.0


def simulate(
    job: SimulatedJob,
    cluster: ReliabilitySpec,
    resilience: ResilienceSpec,
    seed: int = 0,
    failures: Sequence[FailureAt] | None = None,
    max_failures: int = MAX_FAILURES,
) -> SimulatedRun:
    """Simulate one run, from its first step to its last, or until `max_failures` failures. `failures` replace the
    random ones."""
    kind = GroupsSimulation if resilience.mode == "elastic" and job.replica_groups > 1 else NodesSimulation
    return kind(job, cluster, resilience, Clock(seed), failures).run(max_failures)


def simulate_many(
    job: SimulatedJob, cluster: ReliabilitySpec, resilience: ResilienceSpec, seeds: int
) -> list[SimulatedRun]:
    """Simulate runs that differ in random events and in uncertain inputs: each run draws its rates within
    `known_within`. Returns the runs sorted by goodput, worst first. Every job uses the same seeds and thus the same
    draws, so that jobs are comparable."""
    rates = [draw(cluster, random.Random(f"inputs {seed}")) for seed in range(seeds)]
    runs = [simulate(job, drawn, resilience, seed, max_failures=ENOUGH_OF_MANY) for seed, drawn in enumerate(rates)]
    return sorted(runs, key=lambda run: run.goodput)


def draw(cluster: ReliabilitySpec, chance: random.Random) -> ReliabilitySpec:
    """Multiply each value by a log-normal factor that is within `known_within` with 90% probability."""
    factors = {key: within ** (chance.gauss(0, 1) / NORMAL_90) for key, within in cluster.known_within.items()}
    drawn = replace(cluster, **{key: getattr(cluster, key) * factor for key, factor in factors.items()})
    return replace(drawn, job_wide_fraction=min(1.0, drawn.job_wide_fraction))


class Clock:
    """Runs actions in chronological order; actions at the same time run in the order in which they were scheduled."""

    def __init__(self, seed: int = 0) -> None:
        self.now_s = 0.0
        self.random = random.Random(seed)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._counter), action))

    @property
    def next_s(self) -> float:
        """Return the time of the next action; infinity if none remain."""
        return self._heap[0][0] if self._heap else float("inf")

    def step(self) -> None:
        """Advance to the next action and run it. Raises IndexError if none remain."""
        self.now_s, _, action = heapq.heappop(self._heap)
        action()


class EventSimulation(ABC):
    """What all simulated runs have in common: the clock, the failures, the progress and its pauses."""

    def __init__(
        self,
        job: SimulatedJob,
        cluster: ReliabilitySpec,
        resilience: ResilienceSpec,
        clock: Clock,
        failures: Sequence[FailureAt] | None = None,
    ) -> None:
        self.job = job
        self.cluster = cluster
        self.resilience = resilience
        self.clock = clock
        self.takes = reliability.durations(cluster, job.state_bytes_per_device, job.load_s)
        self.mtbf_s = reliability.job_mtbf_s(cluster, job.devices)
        self.progress = _Progress(job)
        self.paused_by = 0
        """The failure or node return that the job is waiting to have handled; completions of earlier ones are
        ignored."""
        self.event = 0
        self.failures = 0
        self.failed_s: float | None = None
        """The time of a failure after which the run has not taken a step yet."""
        self.pause_s = 0.0
        if failures is None:
            self._schedule_failure()
        for failure in failures or ():
            self.clock.after(failure.at_s, partial(self._strike, failure.node, failure.group))

    def run(self, max_failures: int) -> SimulatedRun:
        while self.failures < max_failures:
            finish_s = self.clock.now_s + self.progress.wall_to_finish_s()
            if finish_s <= self.clock.next_s:
                self.progress.advance(finish_s)
                break
            self.clock.step()
        progress = self.progress
        return SimulatedRun(progress.now_s, progress.work_s, progress.lost_s, self.failures, self.pause_s)

    def _schedule_failure(self) -> None:
        self.clock.after(self.clock.random.expovariate(1 / self.mtbf_s), self._fail)

    def _fail(self) -> None:
        self._schedule_failure()
        node = self.clock.random.randrange(self.job.num_nodes)
        self._strike(node, None, job_wide=self.clock.random.random() < self.cluster.job_wide_fraction)

    def _strike(self, node: int, group: int | None = None, *, job_wide: bool = False) -> None:
        self.failures += 1
        self.failed_s = self.clock.now_s
        self.progress.advance(self.clock.now_s)
        self._handle_failure(node, group, job_wide=job_wide)

    @abstractmethod
    def _handle_failure(self, node: int, group: int | None, *, job_wide: bool) -> None: ...

    @abstractmethod
    def _continue(self) -> None:
        """Take steps again after a pause."""

    def _pause(self, reason: str, duration_s: float) -> None:
        """Pause the run for some time, or until the next pause if that is infinite."""
        self.event += 1
        event = self.paused_by = self.event
        self.progress.paused_for = reason
        if duration_s < math.inf:
            self.clock.after(duration_s, lambda: self._resume(event))

    def _resume(self, event: int) -> None:
        if event == self.paused_by:
            self.progress.advance(self.clock.now_s)
            self._continue()
            if self.failed_s is not None and not self.progress.paused_for:
                self.pause_s = self.clock.now_s - self.failed_s
                self.failed_s = None


class NodesSimulation(EventSimulation):
    """A run with one replica group: it restarts with a spare node or on fewer nodes, or waits for a repaired one."""

    def __init__(
        self,
        job: SimulatedJob,
        cluster: ReliabilitySpec,
        resilience: ResilienceSpec,
        clock: Clock,
        failures: Sequence[FailureAt] | None = None,
    ) -> None:
        super().__init__(job, cluster, resilience, clock, failures)
        self.supervisor = SimulatedSupervisor(
            resilience, job.num_nodes, cluster.spare_nodes or 0, self._speed_on, copies=job.copy_interval_s < math.inf
        )
        self.detected_s = 0.0
        """The time when the last failure has been detected."""

    def _speed_on(self, nodes: int) -> float | None:
        return 1.0 if nodes == self.job.num_nodes else self.job.speed_on(nodes)

    def _handle_failure(self, node: int, group: int | None, *, job_wide: bool) -> None:
        now_s = self.clock.now_s
        if job_wide or group is not None:
            decision = self.supervisor.fail(now_s)
        elif node < len(self.supervisor.own) and self.supervisor.own[node] not in self.supervisor.absent:
            lost = self.supervisor.own[node]
            decision = self.supervisor.lose_node(now_s, lost)
            self.clock.after(self.cluster.repair_s, lambda: self._connect(lost))
        else:
            return
        self.progress.lose(decision.source)
        self.detected_s = now_s + self.cluster.detect_s
        self._follow(decision)

    def _connect(self, node: int) -> None:
        self.progress.advance(self.clock.now_s)
        was_running = self.supervisor.is_running
        decision = self.supervisor.connect(self.clock.now_s, node)
        if not was_running:
            self._follow(decision)
        elif not self.progress.paused_for:
            self._use_spares()

    def _continue(self) -> None:
        self.progress.paused_for = None
        self.supervisor.note_step(self.clock.now_s)
        self._use_spares()

    def _use_spares(self) -> None:
        takes = self.takes
        planned_s = takes.save_s + takes.start_s + takes.load_s
        remaining_s = (self.job.work_s - self.progress.work_s) / self.progress.pace
        decision = self.supervisor.use_spares(self.clock.now_s, remaining_s, planned_s)
        if decision.kind != "none":
            self.progress.save()
            self.progress.rate = decision.plan
            self._pause("restart", planned_s)

    def _follow(self, decision: NodesDecision[float]) -> None:
        """Restart after a failure, or wait for a node."""
        takes = self.takes
        self.progress.rate = decision.plan
        duration_s = math.inf
        if self.supervisor.is_running:
            duration_s = max(0.0, self.detected_s - self.clock.now_s) + takes.start_s
            duration_s += takes.swap_s if decision.kind == "restart" and decision.joined else 0.0
            duration_s += takes.load_s if decision.source == "disk" else takes.heal_s
        self._pause("restart", duration_s)


class GroupsSimulation(EventSimulation):
    """A run with several replica groups: the others continue without a lost one."""

    def __init__(
        self,
        job: SimulatedJob,
        cluster: ReliabilitySpec,
        resilience: ResilienceSpec,
        clock: Clock,
        failures: Sequence[FailureAt] | None = None,
    ) -> None:
        super().__init__(job, cluster, resilience, clock, failures)
        self.started = self.standing = start_run(resilience, job.replica_groups)
        self.away: dict[int, int] = {}
        """Absent replica groups, each with the failure that ends when the group returns."""
        self.spares_free_s = [0.0] * (cluster.spare_nodes or 0)

    def _handle_failure(self, node: int, group: int | None, *, job_wide: bool) -> None:
        hit = tuple(groups_of_node(node, self.job.num_nodes, self.job.replica_groups)) if group is None else (group,)
        self.standing = self.standing.after("lost", self.standing.groups if job_wide else hit)
        self.progress.lose("disk" if self.standing.is_lost else "peers")
        wait_for_node_s = 0.0
        if not job_wide and group is None:
            # The first free spare takes over; the failed node is repaired and becomes a spare.
            repaired_s = self.clock.now_s + self.cluster.repair_s
            free_s = heapq.heappushpop(self.spares_free_s, repaired_s)
            wait_for_node_s = max(self.takes.swap_s, free_s - self.clock.now_s)
        if self.standing.is_lost:
            self.away.clear()  # absent groups start when the job does
            self.standing = self.started
            self._pause("restart", self.takes.restart_s - self.takes.swap_s + wait_for_node_s)
        else:
            for lost in hit:
                self._leave(lost, self.takes.group_return_s - self.takes.swap_s + wait_for_node_s)

    def _leave(self, group: int, away_s: float) -> None:
        """Remove a group. The others continue without it, or wait if too few of them remain."""
        self.event += 1
        failure = self.away[group] = self.event
        self.standing = self.standing.after("left", (group,))
        self.clock.after(away_s, lambda: self._return(group, failure))
        if self.progress.paused_for != "restart":
            self._pause("stall", self.cluster.shrink_stall_s)

    def _return(self, group: int, failure: int) -> None:
        if self.away.get(group) != failure:
            return
        self.progress.advance(self.clock.now_s)
        del self.away[group]
        self.standing = self.standing.after("returned", (group,))
        if self.progress.paused_for != "restart":
            self._pause("stall", self.cluster.rejoin_stall_s)

    def _continue(self) -> None:
        active = self.job.replica_groups - len(self.away)
        enough = not self.away or recovery.enough_groups(self.resilience, active)
        self.progress.paused_for = None if enough else "stall"
        self.progress.rate = active / self.job.replica_groups


class _Progress:
    """Tracks the work done and saved, and the position in the cycle of working for `interval_s` and then writing a
    checkpoint."""

    def __init__(self, job: SimulatedJob) -> None:
        self.job = job
        self.now_s = 0.0
        self.work_s = 0.0
        self.rate = 1.0
        self.paused_for: str | None = None
        self.lost_s: dict[str, float] = defaultdict(float)
        self.position_s = 0.0
        self.saved_s = self.previously_saved_s = 0.0
        self.copying = job.copy_s / (job.copy_interval_s + job.copy_s)
        """Fraction of the training time spent on copies in memory."""

    def advance(self, now_s: float) -> None:
        """Add the time since the last call."""
        elapsed_s = now_s - self.now_s
        self.now_s = now_s
        if self.paused_for:
            self.lost_s[self.paused_for] += elapsed_s
        else:
            self._work(elapsed_s)

    def _work(self, elapsed_s: float) -> None:
        interval_s = self.job.interval_s
        cycles, position_s = divmod(self.position_s + elapsed_s, interval_s + self.job.blocked_s)
        since_saved_s = min(position_s, interval_s)
        training_s = cycles * interval_s + since_saved_s - min(self.position_s, interval_s)
        self.work_s += self.pace * training_s
        self.lost_s["shrunk"] += (1 - self.rate) * (1 - self.copying) * training_s
        self.lost_s["checkpoint"] += elapsed_s - training_s + self.copying * training_s
        self.position_s = position_s
        if cycles:
            latest_s = self.work_s - self.pace * since_saved_s
            self.previously_saved_s = latest_s - self.pace * interval_s if cycles > 1 else self.saved_s
            self.saved_s = latest_s

    @property
    def pace(self) -> float:
        """Work per second of training, without checkpoints but with the copies in memory."""
        return self.rate * (1 - self.copying)

    def save(self) -> None:
        """Write a checkpoint of all work."""
        self.saved_s = self.previously_saved_s = self.work_s
        self.position_s = 0.0

    def lose(self, source: Source | Literal["peers"]) -> None:
        """Undo the work that is newer than the state at `source`; if other replica groups have the state, only the
        uncommitted step."""
        if source == "peers":
            since_step_s = min(self.position_s, self.job.interval_s) % self.job.step_time_s
            lost_s = 0.0 if self.paused_for else self.pace * since_step_s
        else:
            # The latest checkpoint may still be in transfer to storage; if so, only the previous one is complete.
            if self.position_s < self.job.written_s - self.job.blocked_s:
                self.saved_s = self.previously_saved_s
            self.previously_saved_s = self.saved_s
            self.position_s = 0.0
            lost_s = self.work_s - self.saved_s
        if source == "memory":
            lost_s = min(lost_s, self.work_s % self.job.copy_interval_s)
        self.work_s -= lost_s
        self.lost_s["rework"] += lost_s

    def wall_to_finish_s(self) -> float:
        """Return the time until the last step ends, provided that no event occurs before that."""
        if self.paused_for:
            return float("inf")
        interval_s = self.job.interval_s
        blocked_s = self.job.blocked_s
        training_s = (self.job.work_s - self.work_s) / self.pace + min(self.position_s, interval_s)
        checkpoints = max(0.0, -(-training_s // interval_s) - 1)
        return training_s + checkpoints * blocked_s - self.position_s


Change = Literal["lost", "left", "returned"]
"""What can happen to a group: it loses a node, it is absent until the node is replaced, or it resumes training."""
PATIENCE = 10**6
"""Allowed restarts per hour, effectively unlimited. The forecast is about how long the work takes, so it assumes that a
run that reaches the recipe's limit is started again."""


class Standing:
    """A state of the run, with its successor states computed so far."""

    def __init__(self, state: run_state.RunState, known: dict[run_state.RunState, Standing]) -> None:
        self.state = state
        self.is_lost = state.is_lost
        self.groups = tuple(range(len(state.groups)))
        self._known = known
        known[state] = self
        self._after: dict[tuple[Change, tuple[int, ...]], Standing] = {}

    def after(self, change: Change, groups: tuple[int, ...]) -> Standing:
        key = change, groups
        if key not in self._after:
            state = self.state
            events: list[run_state.Event] = [run_state.NodeLost(0, "", "", groups)] if change == "lost" else []
            for group in groups:
                if change == "left":
                    events.append(run_state.PresenceChanged(group, "awaited"))
                    events.append(run_state.GroupEnded(group, done=False, from_outside=True))
                if change == "returned":
                    events += [run_state.PresenceChanged(group, "there"), run_state.Stepped(group)]
            for event in events:
                state, _ = recovery.next_action(state, event)
            if change == "returned":
                # Only the restart limit depends on when returned groups started; ignoring those times reduces the
                # number of states.
                fresh = list(state.groups)
                for group in groups:
                    fresh[group] = fresh[group]._replace(starts=1, restarts_s=(), start_at_s=-math.inf)
                state = state._replace(groups=tuple(fresh))
            self._after[key] = self._known.get(state) or Standing(state, self._known)
        return self._after[key]


def start_run(resilience: ResilienceSpec, groups: int) -> Standing:
    """Return the state of a run that trains with this many groups."""
    patient = replace(resilience, max_restarts_per_hour=PATIENCE)
    state, _ = recovery.next_action(recovery.begin(patient, groups, presence="there"), run_state.Tick(0.0))
    return Standing(state, {})
