"""A simulated run and a supervisor meet the same failures, and choose the same after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from lab.events import stepped, write_event
from run.memory_backend import MemoryBackend, World
from run.test_supervise import a_job, with_resilience

from trainspec_cli.balance.decisions.speeds import SKIPPED_STEPS
from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.planner.run import goodput
from trainspec_cli.planner.run.goodput import PATIENCE
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run import supervise
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.nodes import SimulatedSupervisor
from trainspec_cli.run.recovery.recovery import LONGEST_PAUSE_S
from trainspec_cli.run.recovery.run_state import Begun, NodeLost, NodesSeen, PresenceChanged, Stepped, WorkerFailed
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.supervise import MEASURED_STEPS, Supervisor

MINUTE_S = 60.0
CLUSTER = ReliabilitySpec(job_wide_fraction=0.2, spare_nodes=1, repair_s=0.0)


class Supervised:
    """A supervisor whose processes live in memory. What fails in the simulation fails here."""

    def __init__(self, folder: Path, plan: Plan, groups: int, resilience: ResilienceSpec):
        patient = {"mode": resilience.mode, "min_groups": resilience.min_groups, "max_restarts_per_hour": PATIENCE}
        self.world = World(groups)
        self.world.checkpoint = 10
        self.supervisor = Supervisor(a_job(folder), with_resilience(plan, groups, **patient), self._open, print)
        self.now_s = 0.0
        self.supervisor.open()
        self.come_back()

    def _open(self, job: Job, plan: Plan | None) -> MemoryBackend:
        job.logs.mkdir(parents=True, exist_ok=True)  # as a backend does that starts processes
        return self.world.open(job, plan)

    @property
    def phases(self) -> list[str]:
        return [group.phase for group in self.supervisor.state.groups]

    def fail(self, groups: tuple[int, ...]) -> bool:
        """Lose the node of each group; return whether the state is lost with them."""
        live = tuple(group for group in groups if group in self.world.live)
        self.world.checkpoint += 10
        self.world.backend.queue.append(NodeLost(groups[0], "node", "it is off", live))
        self._turn()
        return self.supervisor.state.is_lost

    def clear_away(self, groups: tuple[int, ...]) -> None:
        """Nothing is left of what failed; the supervisor waits for its nodes."""
        self.world.backend.queue += [PresenceChanged(group, "awaited") for group in groups]
        self._turn()

    def come_back(self, groups: tuple[int, ...] | None = None) -> None:
        """Have the nodes of these groups there, and their workers make a step."""
        self._turn(LONGEST_PAUSE_S)  # the simulation's own durations contain the pause
        back = range(self.world.groups) if groups is None else groups
        self.world.backend.queue += [PresenceChanged(group, "there") for group in back]
        self._turn()
        self._turn()  # a generation that has begun reports its nodes

    def _turn(self, after_s: float = 0.1) -> None:
        self.now_s += after_s
        self.supervisor.turn(self.now_s, StopRequests())
        for group in self.world.live:
            self.world.backend.queue += [Begun(group), Stepped(group)]


class Watched(goodput.GroupsSimulation):
    """A simulation that passes each failure and return on to a supervisor, and compares what both choose."""

    supervised: Supervised
    choices: list[str]

    def _handle_failure(self, node: int, group: int | None, *, job_wide: bool) -> None:
        hit = self.standing.groups if job_wide else (node,)
        starts = len(self.supervised.world.starts)
        is_lost = self.supervised.fail(hit)
        super()._handle_failure(node, group, job_wide=job_wide)
        self.supervised.clear_away(hit)
        if self.choices[-1] == "restart":
            assert is_lost
            self.supervised.come_back()
            assert len(self.supervised.world.starts) > starts
        else:
            assert not is_lost
        self._compare()

    def _pause(self, reason: str, duration_s: float) -> None:
        if reason == "restart":
            self.choices.append("restart")
        super()._pause(reason, duration_s)

    def _leave(self, group: int, away_s: float) -> None:
        self.choices.append("leave")
        super()._leave(group, away_s)

    def _return(self, group: int, failure: int) -> None:
        if self.away.get(group) == failure:
            self.choices.append("return")
            self.supervised.come_back((group,))
        super()._return(group, failure)
        self._compare()

    def _compare(self) -> None:
        assert [group.phase for group in self.standing.state.groups] == self.supervised.phases, self.choices
        assert not self.supervised.supervisor.state.given_up, "who may still come is waited for"


@pytest.mark.parametrize(
    ("groups", "resilience"),
    [(2, ResilienceSpec(mode="elastic")), (5, ResilienceSpec(mode="elastic", min_groups=3))],
    ids=["two groups", "five groups"],
)
def test_after_each_failure_and_return_the_supervisor_chooses_as_the_simulation_does(
    groups: int, resilience: ResilienceSpec, tmp_path: Path, make_plan: Callable[..., Plan]
) -> None:
    job = goodput.SimulatedJob(
        work_s=1e9,
        step_time_s=5.0,
        devices=100_000,  # fails often enough for groups to be away together
        replica_groups=groups,
        interval_s=10 * MINUTE_S,
        blocked_s=1.0,
        written_s=1.0,
        state_bytes_per_device=5e9,
        load_s=10.0,
    )
    simulation = Watched(job, CLUSTER, resilience, goodput.Clock(seed=7), None)
    simulation.choices = []
    simulation.supervised = Supervised(tmp_path, make_plan(), groups, resilience)
    simulation.run(max_failures=200)
    assert simulation.failures == 200
    assert set(simulation.choices) == {"restart", "leave", "return"}


# A run of one group on several nodes: the supervisor and the simulated run choose the same nodes after each event

NODES, SPARES, STEPS, STEP_S = 4, 2, 100_000, 5.0
START_S = 100.0
APART_S = 700.0
"""Time between two events. Sixths of an hour would lie at the edge of what counts as a restart of the last hour."""


class SupervisedNodes:
    """A supervisor of a run on several nodes, whose processes live in memory. It runs on node 0."""

    def __init__(self, folder: Path, plan: Plan, resilience: ResilienceSpec, fits: set[int], clock: list[float]):
        spec = replace(plan.spec, resilience=resilience, train=replace(plan.spec.train, max_steps=STEPS))
        plan = replace(plan, spec=spec, layout=Layout(dp_replicate=NODES), num_nodes=NODES, devices_per_node=1)
        numbers = tuple(range(NODES + SPARES))
        self.connected = set(numbers)
        self.fits, self.clock = fits, clock
        self.world = World()
        self.world.answers_stop = True
        self.step = 0
        logs = folder / "logs" / "launch_01"
        job = Job(folder, ("agents",), {LAUNCH_ID: "x"}, NODES, 30.0, logs, nodes=numbers)
        job = replace(job, survives_lost_nodes=resilience.survives_lost_nodes)
        write_json(job.run.plan_json, to_plain(plan))
        self.supervisor = Supervisor(job, plan, self._open, lambda _: None, self._replan)
        self.supervisor.open()
        self._settle()
        self.make_steps()

    def _replan(self, plan: Plan, nodes: int) -> Plan | None:
        return replace(plan, num_nodes=nodes, layout=Layout(dp_replicate=nodes)) if nodes in self.fits else None

    def _open(self, job: Job, plan: Plan | None) -> MemoryBackend:
        assert plan is not None
        job.logs.mkdir(parents=True, exist_ok=True)
        self.job, self.plan = job, plan
        self.world.presence = self._presence
        backend = self.world.open(job, plan)
        self._see_nodes()
        return backend

    @property
    def own(self) -> tuple[int, ...]:
        return self.job.nodes[: self.plan.num_nodes]

    @property
    def _presence(self) -> str:
        return "there" if self.connected.issuperset(self.own) else "awaited"

    def _see_nodes(self) -> None:
        hostnames = tuple(f"host{node}" if node in self.connected else "" for node in self.job.nodes)
        presence = PresenceChanged(0, self._presence)  # type: ignore[arg-type]
        self.world.backend.queue += [NodesSeen(hostnames), presence]

    def _settle(self) -> tuple[str, tuple[int, ...]]:
        """Return what the supervisor does once all that follows from an event has happened."""
        starts = len(self.world.starts)
        for after_s in (0.1, 0.1, LONGEST_PAUSE_S, 0.1, 0.1):
            self.clock[0] += after_s
            self.supervisor.turn(self.clock[0], StopRequests())
            if self.supervisor.state.is_over:
                return "end", ()
        if len(self.world.starts) > starts:
            return "restart", self.own
        return ("none" if self.world.live else "wait"), self.own

    def lose_node(self, node: int) -> tuple[str, tuple[int, ...]]:
        self.connected.remove(node)
        self._see_nodes()
        self.world.backend.queue.append(NodeLost(node, f"host{node}", "is off", (0,)))
        return self._settle()

    def fail(self) -> tuple[str, tuple[int, ...]]:
        self.world.backend.queue.append(WorkerFailed(0))
        if self.world.live:
            self.world.end(0, from_outside=True, was_killed=True)
        return self._settle()

    def connect(self, node: int) -> tuple[str, tuple[int, ...]]:
        self.connected.add(node)
        self._see_nodes()
        return self._settle()

    def make_steps(self) -> tuple[str, tuple[int, ...]]:
        """Take the steps after which the supervisor may use another node."""
        self.clock[0] += START_S
        for _ in range(SKIPPED_STEPS + MEASURED_STEPS):
            self.step += 1
            write_event(self.job.run.events(0), replace(stepped(self.step), step_time_s=STEP_S))
        self.world.checkpoint = self.step
        self.world.backend.queue += [Begun(0), Stepped(0)]
        return self._settle()


@pytest.mark.parametrize("response", ["continue", "wait", "end"])
@pytest.mark.parametrize("fits", [{1, 2, 3}, {2}, set()], ids=["any number", "only two", "no fewer"])
@pytest.mark.parametrize("limit", [1000, 3], ids=["patient", "three restarts per hour"])
def test_a_simulated_run_uses_the_nodes_that_the_supervisor_chooses(
    response: str, fits: set[int], limit: int, tmp_path: Path, make_plan: Callable[..., Plan],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    clock = [0.0]
    monkeypatch.setattr(supervise.time, "monotonic", lambda: clock[0])
    resilience = ResilienceSpec("restart", after_node_loss=response, max_restarts_per_hour=limit)  # type: ignore[arg-type]
    kinds = set()
    for seed in range(6):
        chance = random.Random(seed)
        clock[0] = 1000.0
        real = SupervisedNodes(tmp_path / f"run{seed}", make_plan(), resilience, fits, clock)
        simulated = SimulatedSupervisor(resilience, NODES, SPARES, lambda n: n if n == NODES or n in fits else None)
        simulated.note_step(clock[0])
        for _ in range(40):
            clock[0] += APART_S
            now_s = clock[0]
            away = sorted(set(range(NODES + SPARES)) - real.connected)
            event = chance.choice(["lose", "lose", "fail", "connect", "connect"])
            if event == "lose" and (there := sorted(real.connected & set(real.own) - {0})):
                node = chance.choice(there)
                expected = simulated.lose_node(now_s, node)
                found = real.lose_node(node)
            elif event == "connect" and away:
                # A node that is not awaited does not change a waiting run, which ends soon.
                if not (simulated.is_running or simulated.absent):
                    break
                node = chance.choice(sorted(simulated.absent) or away)
                expected = simulated.connect(now_s, node)
                found = real.connect(node)
            elif event == "fail" and simulated.is_running:
                expected = simulated.fail(now_s)
                found = real.fail()
            else:
                continue
            kinds.add(expected.kind)
            assert found[0] == expected.kind
            if expected.kind == "end":
                break
            assert (found[1], real.plan.num_nodes) == (expected.nodes, expected.plan)
            assert simulated.is_running == bool(real.world.live)
            while simulated.is_running:  # the run takes steps, and uses a returned node
                simulated.note_step(clock[0])
                remaining_s = (STEPS - real.step - SKIPPED_STEPS - MEASURED_STEPS) * STEP_S
                expected = simulated.use_spares(clock[0] + START_S, remaining_s, START_S)
                found = real.make_steps()
                kinds.add("return" if expected.kind == "restart" else expected.kind)
                assert (found[0], real.own) == (expected.kind, expected.nodes)
                if expected.kind != "restart":
                    break
    wanted = {
        "continue": {"restart", "return"} if fits else {"restart", "wait"},
        "wait": {"restart", "wait"},
        "end": {"end"},
    }
    assert (wanted[response] if limit > 3 else {"end"}) <= kinds
