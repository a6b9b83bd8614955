"""A simulated run and a supervisor meet the same failures, and choose the same after each of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from lab.drawing import slow_after
from run.memory_backend import MemoryBackend, World
from run.test_supervise import a_job, with_resilience

from trainspec_cli.planner.run import goodput
from trainspec_cli.planner.run.goodput import PATIENCE
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.recovery import LONGEST_PAUSE_S
from trainspec_cli.run.recovery.run_state import Begun, NodeLost, PresenceChanged, Stepped
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.supervise import Supervisor

MINUTE_S = 60.0
CLUSTER = ReliabilitySpec(job_wide_fraction=0.2)


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


class Watched(goodput._Simulation):
    """A simulation that passes each failure and return on to a supervisor, and compares what both choose."""

    supervised: Supervised
    choices: list[str]

    def _strike(self, group: int, *, job_wide: bool) -> None:
        every = self.standing.groups
        hit = every if job_wide or len(every) == 1 else (group,)
        starts = len(self.supervised.world.starts)
        generations = len(self.supervised.world.jobs)
        is_lost = self.supervised.fail(hit)
        super()._strike(group, job_wide=job_wide)
        self.supervised.clear_away(hit)
        if self.choices[-1] == "restart":
            assert is_lost
            self.supervised.come_back()
            assert len(self.supervised.world.starts) > starts
            assert len(self.supervised.world.jobs) == generations + (len(every) == 1)
        else:
            assert not is_lost
        self._compare()

    def _pause(self, reason: str, duration_s: float) -> None:
        if reason == "restart":
            self.choices.append("restart")
        super()._pause(reason, duration_s)

    def _leave(self, group: int, wait_for_node_s: float) -> None:
        self.choices.append("leave")
        super()._leave(group, wait_for_node_s)

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
    ("groups", "resilience", "kinds"),
    slow_after(
        2,
        [
            (1, ResilienceSpec(mode="restart"), {"restart"}),
            (2, ResilienceSpec(mode="elastic"), {"restart", "leave", "return"}),
            (5, ResilienceSpec(mode="elastic", min_groups=3), {"restart", "leave", "return"}),
        ],
    ),
    ids=["restart", "two groups", "five groups"],
)
def test_after_each_failure_and_return_the_supervisor_chooses_as_the_simulation_does(
    groups: int, resilience: ResilienceSpec, kinds: set[str], tmp_path: Path, make_plan: Callable[..., Plan]
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
    assert set(simulation.choices) == kinds
