"""The search for a node that a run is faster without, on a run folder that the tests write."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.events import stepped, write_event

from trainspec_cli.balance.decisions.speeds import SKIPPED_STEPS
from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.records import ABSENT, to_plain
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run import supervise as module
from trainspec_cli.run.channel.messages import SpeedsReport
from trainspec_cli.run.channel.worker import WorkerMail
from trainspec_cli.run.folder.event_types.events import NodesAchievedEvent, NodesEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.record import read_plan, read_plan_of_all_nodes
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.run_state import NodeLost, NodeReturned, NodeSlow, NodeUnfit
from trainspec_cli.run.supervise import ASK_AGAIN_S, MEASURED_STEPS, CommandNodes, RunNodes

STEP_S = 5.0
"""The slow node computes for 4 of these seconds."""


class AtOnce(Executor):
    """A planner that answers immediately, or `later`."""

    def __init__(self) -> None:
        self.later: list[Callable[[], None]] = []
        self.waits = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()

        def make() -> None:
            try:
                done.set_result(work(*args, **kwargs))
            except Exception as error:
                done.set_exception(error)

        self.later.append(make)
        if not self.waits:
            self.later.pop()()
        return done


class Lab:
    """Three nodes of a device each, and a spare one; every rank has one of three samples."""

    def __init__(self, root: Path, plan: Plan, mode: str = "auto", spares: int = 0, **scheduler: object):
        batching = replace(plan.spec.batching, global_batch_size=3)
        train = replace(plan.spec.train, max_steps=1000)
        wanted = SchedulerSpec(mode=mode, **scheduler)  # type: ignore[arg-type]
        spec = replace(plan.spec, batching=batching, scheduler=wanted, train=train)
        plan = replace(plan, spec=spec, layout=Layout(dp_replicate=3), num_nodes=3, devices_per_node=1)
        self.plan = replace(plan, micro_batch_size=1, grad_accum_steps=1)
        logs = root / "logs"
        nodes = tuple(range(3 + spares))
        self.job = Job(root, ("agents",), {LAUNCH_ID: "x"}, 3, 30.0, logs, nodes=nodes)
        write_json(self.job.run.plan_json, to_plain(self.plan))
        self.asked: list[int] = []
        self.has_fewer, self.reports, self.step = True, list[str](), 0
        self.executor = executor = AtOnce()
        self.mail = WorkerMail()
        self.run_nodes = RunNodes(self.job, self.plan, self.replan, self.reports.append, self.mail, executor)

    def replan(self, plan: Plan, nodes: int) -> Plan | None:
        self.asked.append(nodes)
        fewer = replace(plan, num_nodes=nodes, layout=Layout(dp_replicate=nodes), micro_batch_size=2)
        return fewer if self.has_fewer else None

    def open(self, job: Job | None = None, plan: Plan | None = None) -> None:
        self.mail.clear()
        self.run_nodes.open(job or self.job, plan or self.plan)
        self.run_nodes.hostnames = tuple(f"host{number}" for number in (job or self.job).nodes)

    def report_speeds(self, *samples_s: float) -> None:
        """Report the seconds that each rank takes for its sample."""
        layout, zeros = Layout(dp_replicate=len(samples_s)), (0.0,) * len(samples_s)
        report = SpeedsReport(
            step=self.step,
            step_s=max(samples_s),
            layout=layout,
            micro_batches=1,
            samples=(1,) * len(samples_s),
            fixed_s=zeros,
            per_sample_s=samples_s,
        )
        self.mail.speeds = report

    def make_steps(self, steps: int, step_s: float = STEP_S) -> list[NodeSlow]:
        for _ in range(steps):
            self.step += 1
            write_event(self.job.run.events(0), replace(stepped(self.step), step_time_s=step_s))
        return self.run_nodes.poll()

    def become_slow(self) -> None:
        """The second node computes four times as long, from the third step on."""
        self.make_steps(SKIPPED_STEPS)
        self.report_speeds(1.0, 4.0, 1.0)

    def until_decided(self) -> NodeSlow:
        for _ in range(100):
            if found := self.make_steps(1):
                return found[0]
        raise AssertionError("no node was found")

    def leave_out(self, node: int) -> tuple[Job, Plan]:
        return self.run_nodes.select([NodeSlow(node, f"host{node}", "it is slow")])

    def lose(self, *nodes: int) -> tuple[Job, Plan]:
        return self.run_nodes.select([NodeLost(node, f"host{node}", "is off", (0,)) for node in nodes])

    @property
    def directives(self) -> list[NodesEvent | NodesAchievedEvent]:
        path = self.job.run.directives
        return list(read_log(path)) if path.exists() else []  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def make_lab(tmp_path: Path, make_plan: Callable[..., Plan]) -> Callable[..., Lab]:
    return lambda **about: Lab(tmp_path, make_plan(), **about)


def test_a_node_is_found_once_as_much_was_lost_as_the_start_took(make_lab, clock: list[float]) -> None:
    """The start took 20 s, and each step loses two: without the node, where one of two ranks has two samples, it would
    take three seconds and not five. The first step that is read with the report may be one before it."""
    lab = make_lab()
    lab.open()
    clock[0] += 20.0
    lab.become_slow()
    assert [lab.make_steps(1) for _ in range(MEASURED_STEPS + 9)] == [[]] * (MEASURED_STEPS + 9)
    (found,) = lab.make_steps(1)
    assert (found.node, found.hostname) == (1, "host1")
    for fact in ("node 1 (host1) ", "4.0 times", "takes 5.0 s", "3.0 s without it"):
        assert fact in found.why
    assert lab.make_steps(100) == [], "that is decided"
    assert (lab.directives, lab.asked) == ([], [2])


def test_the_run_goes_on_with_fewer_nodes_and_its_effect_is_measured(make_lab, clock: list[float]) -> None:
    lab = make_lab()
    lab.open()
    lab.become_slow()
    assert lab.until_decided().node == 1
    step = lab.step
    job, plan = lab.leave_out(1)
    assert (job.nodes, job.left_out, job.world_size) == ((0, 2), (1,), 2)
    assert (plan.num_nodes, plan.layout) == (2, Layout(dp_replicate=2))
    assert read_plan(lab.job.run) == plan
    assert read_plan_of_all_nodes(lab.job.run) == lab.plan
    clock[0] += 30.0
    lab.open(job, plan)
    lab.make_steps(SKIPPED_STEPS, step_s=9.0)
    clock[0] += 30.0
    lab.make_steps(MEASURED_STEPS - 1, step_s=3.2)
    assert len(lab.directives) == 1
    lab.make_steps(1, step_s=3.2)
    given, achieved = lab.directives
    assert given == NodesEvent(
        step=step,
        number=1,
        applied=True,
        reason="slow",
        node=1,
        host="host1",
        num_nodes=2,
        layout=Layout(dp_replicate=2),
        pace=4.0,
        before_s=5.0,
        expected_s=3.0,
        cost_s=0.0,
        time=given.time,
    )
    assert isinstance(achieved, NodesAchievedEvent)
    assert (achieved.number, achieved.achieved_s, achieved.restart_s) == (1, 3.2, 30.0)
    assert lab.asked == [2, 1], "and so on, with one node less"


def test_a_spare_node_that_is_there_takes_the_place(make_lab) -> None:
    lab = make_lab(spares=2)
    lab.open()
    lab.run_nodes.hostnames = ("host0", "host1", "host2", "", "host4")
    lab.become_slow()
    assert "expected to take 2.0 s" in lab.until_decided().why
    job, plan = lab.leave_out(1)
    assert (job.nodes, job.left_out, job.world_size) == ((0, 2, 4, 3), (1,), 3)
    assert plan == lab.plan == read_plan(job.run)
    assert not job.run.plan_of_all_nodes.exists(), "nothing is left out of the plan"
    (given,) = lab.directives
    assert isinstance(given, NodesEvent)
    assert (given.spare, given.num_nodes, given.expected_s) == (4, 3, 2.0)
    lab.open(job, plan)
    lab.run_nodes.hostnames = ("host0", "host2", "host4", "", "host1")
    lab.report_speeds(1.0, 1.0, 4.0)
    assert lab.until_decided().node == 4, "by its number"
    job, _ = lab.leave_out(4)
    assert (job.nodes, job.left_out) == ((0, 2, 3), (1, 4)), "one that was left out is no spare"


def test_a_spare_node_that_goes_meanwhile(make_lab) -> None:
    lab = make_lab(spares=1)
    lab.has_fewer = False
    lab.open()
    lab.become_slow()
    lab.until_decided()
    lab.run_nodes.hostnames = ("host0", "host1", "host2", "")
    assert lab.leave_out(1) == (lab.job, lab.plan)
    (report,) = lab.reports
    assert "node 1 (host1)" in report
    assert lab.directives == []


def test_where_there_is_no_plan_for_fewer_nodes_none_is_left_out(make_lab) -> None:
    lab = make_lab()
    lab.has_fewer = False
    lab.open()
    lab.become_slow()
    assert lab.make_steps(500) == []


def test_nothing_waits_for_the_plan(make_lab) -> None:
    lab = make_lab()
    lab.executor.waits = True
    lab.open()
    lab.become_slow()
    assert lab.make_steps(500) == []
    lab.executor.later.pop()()
    assert lab.until_decided().node == 1


def test_no_training_ends_for_a_fault_of_the_planner(make_lab) -> None:
    lab = make_lab()
    lab.replan = lab.run_nodes._replan = lambda plan, nodes: 1 // 0
    lab.open()
    lab.become_slow()
    assert (lab.make_steps(100), lab.make_steps(100)) == ([], [])
    (report,) = lab.reports
    assert "2 nodes: ZeroDivisionError: " in report


def test_advice_is_written_and_reported_once(make_lab) -> None:
    lab = make_lab(mode="advise")
    lab.open()
    lab.become_slow()
    for _ in range(50):
        assert lab.make_steps(1) == []
    (advice,) = lab.directives
    assert isinstance(advice, NodesEvent)
    assert (advice.applied, advice.node, advice.number, advice.spare) == (False, 1, 1, ABSENT)
    assert len(lab.reports) == 1
    assert lab.reports[0].startswith("advice: scheduler=auto ") and ": node 1 (host1) " in lab.reports[0]
    assert read_plan(lab.job.run) == lab.plan


def test_directives_are_numbered_over_the_starts_of_a_run(make_lab, make_plan, tmp_path: Path) -> None:
    for number in (1, 2):
        lab = make_lab(mode="advise")
        lab.open()
        lab.become_slow()
        lab.make_steps(50)
        lab.make_steps(50)
        assert [event.number for event in lab.directives] == list(range(1, number + 1))


@pytest.mark.parametrize(
    "about",
    [{"mode": "off"}, {"may_change": ("shares", "layers", "layout")}],
    ids=["scheduler=off", "nodes may not change"],
)
def test_where_it_is_not_allowed_nothing_is_planned_or_decided(make_lab, about: dict[str, object]) -> None:
    lab = make_lab(**about)
    lab.open()
    lab.become_slow()
    assert (lab.make_steps(500), lab.asked) == ([], [])


@pytest.mark.parametrize("changed", [{"num_nodes": 1}, {"replica_groups": 3}], ids=["one node", "replica groups"])
def test_runs_that_cannot_leave_a_node_out(make_lab, changed: dict[str, int]) -> None:
    lab = make_lab()
    lab.open(plan=replace(lab.plan, **changed))
    lab.run_nodes.hostnames = ("host0", "", "")
    lab.become_slow()
    assert (lab.make_steps(500), lab.asked) == ([], [])


# Nodes that are lost, and come back


def test_a_run_without_a_lost_node_and_with_it_again(make_lab, clock: list[float]) -> None:
    lab = make_lab()
    lab.open()
    lab.make_steps(3)
    job, plan = lab.lose(1)
    assert (job.nodes, job.left_out, job.world_size, plan.num_nodes) == ((0, 2, 1), (), 2, 2)
    assert (read_plan(job.run), read_plan_of_all_nodes(job.run)) == (plan, lab.plan)
    (lost,) = lab.directives
    assert isinstance(lost, NodesEvent)
    assert (lost.reason, lost.step, lost.node, lost.num_nodes, lost.applied) == ("lost", 3, 1, 2, True)
    lab.open(job, plan)
    lab.run_nodes.hostnames = ("host0", "host2", "")
    clock[0] += 7.0
    assert lab.make_steps(20) == [], "it is away"
    lab.run_nodes.hostnames = ("host0", "host2", "host1")
    (back,) = lab.make_steps(1)
    assert isinstance(back, NodeReturned) and back.node == 1
    job, plan = lab.run_nodes.select([back])
    assert (job.nodes, job.world_size, plan) == ((0, 2, 1), 3, lab.plan)
    assert read_plan(job.run) == lab.plan


def test_the_end_of_a_run_is_not_delayed_by_a_node_that_returns(make_lab, clock: list[float]) -> None:
    """A start takes 100 s, and a third node saves a third of what is left: 5 s per step."""
    lab = make_lab()
    lab.open()
    lab.open(*lab.lose(1))
    clock[0] += 100.0
    lab.make_steps(1000 - 60)  # a third of the 300 s that are left
    lab.run_nodes.hostnames = ("host0", "host2", "host1")
    assert lab.make_steps(1) == []


def test_a_first_node_that_is_slow_leaves_the_work_to_the_others(make_lab) -> None:
    """It goes on with this process. If its agent is lost, the others train on."""
    lab = make_lab()
    lab.open()
    lab.become_slow()
    lab.until_decided()
    job, plan = lab.leave_out(0)
    assert (job.nodes, job.left_out, plan.num_nodes) == ((1, 2), (0,), 2)
    lab.open(job, plan)
    job, plan = lab.lose(1)
    assert (job.nodes, plan.num_nodes) == ((2, 1), 1), "node 1 is first in the job, but is not this node"


def test_a_node_that_is_unfit_is_not_used_again(make_lab) -> None:
    lab = make_lab()
    lab.open()
    job, plan = lab.run_nodes.select([NodeUnfit(2, "host2", "no GPU")])
    assert (job.nodes, job.left_out, plan.num_nodes) == ((0, 1), (2,), 2)
    assert [one.reason for one in lab.directives if isinstance(one, NodesEvent)] == ["unfit"]


def test_a_run_asks_for_a_returned_node_once_if_no_layout_uses_it(make_lab, clock: list[float]) -> None:
    """Of three nodes, two fit no layout: the second returned one is needed, too."""
    lab = make_lab()
    lab.has_fewer = True
    lab.open()
    job, plan = lab.lose(1, 2)
    assert plan.num_nodes == 1
    lab.has_fewer = False

    def start_with(*hostnames: str) -> list[Any]:
        lab.open(job, plan)
        lab.run_nodes.hostnames = hostnames
        clock[0] += 1.0
        return lab.make_steps(20)

    (back,) = start_with("host0", "host1", "")
    job, plan = lab.run_nodes.select([back])
    assert plan.num_nodes == 1
    assert start_with("host0", "host1", "") == [], "that would change nothing"
    (back,) = start_with("host0", "host1", "host2")
    assert lab.run_nodes.select([back])[1] == lab.plan


def test_a_refused_return_is_asked_for_again_later(make_lab, clock: list[float]) -> None:
    lab = make_lab()
    lab.open()
    job, plan = lab.lose(1)
    lab.open(job, plan)
    lab.run_nodes.hostnames = ("host0", "host2", "host1")
    clock[0] += 1.0
    assert len(lab.make_steps(20)) == 1
    lab.run_nodes.note_refusal()
    assert lab.make_steps(20) == []
    clock[0] += ASK_AGAIN_S
    assert len(lab.make_steps(1)) == 1


@pytest.mark.parametrize(
    ("lost", "nodes", "used"), [((1,), (0, 2, 4, 3, 1), 3), ((1, 2), (0, 4, 3, 1, 2), 2), ((0,), (0, 1, 2, 3, 4), 3)]
)
def test_a_connected_spare_takes_the_place_of_a_lost_node(
    make_lab, lost: tuple[int, ...], nodes: tuple[int, ...], used: int
) -> None:
    """Node 3 is not connected. The first node has this process, so only its agent can be lost."""
    lab = make_lab(spares=2)
    lab.open()
    lab.run_nodes.hostnames = ("host0", "host1", "host2", "", "host4")
    job, plan = lab.lose(*lost)
    assert (job.nodes, plan.num_nodes) == (nodes, used)


def test_a_run_that_waits_or_that_fits_no_other_number_of_nodes(make_lab) -> None:
    lab = make_lab()
    lab.has_fewer = False
    lab.open()
    assert (*lab.lose(1), lab.directives) == (lab.job, lab.plan, [])
    resilience = replace(lab.plan.spec.resilience, after_node_loss="wait")
    waiting = replace(lab.plan, spec=replace(lab.plan.spec, resilience=resilience))
    lab.has_fewer = True
    lab.open(plan=waiting)
    assert lab.lose(1) == (lab.job, waiting)


def test_a_run_with_samples_to_move_is_left_to_its_shares(make_lab) -> None:
    """Twelve samples over three ranks: the slow one gets one or two of them, and two nodes would have six each."""
    lab = make_lab()
    lab.open()
    lab.make_steps(SKIPPED_STEPS)
    samples_s = (1.0, 4.0, 1.0)
    layout = Layout(dp_replicate=3)
    report = SpeedsReport(
        step=2,
        step_s=16.0,
        layout=layout,
        micro_batches=4,
        samples=(4, 4, 4),
        fixed_s=(0.0,) * 3,
        per_sample_s=samples_s,
    )
    lab.mail.speeds = report
    lab.make_steps(1, step_s=17.0)
    assert lab.make_steps(200, step_s=17.0) == []


def test_a_report_of_other_ranks_decides_nothing_and_what_fails_ends_the_search(make_lab) -> None:
    lab = make_lab()
    lab.open()
    lab.report_speeds(1.0, 4.0)
    assert lab.make_steps(100) == []
    lab.mail.speeds = replace(lab.mail.speeds, layout=Layout(dp_replicate=3))  # with the figures of two
    assert lab.make_steps(100) == []
    assert lab.reports[0].startswith("no more nodes ")
    lab.report_speeds(1.0, 4.0, 1.0)
    assert (lab.make_steps(100), len(lab.reports)) == ([], 1)


class Command:
    """A user's command on nodes 0 to 2 and, as `spares`, further ones, all of them connected."""

    def __init__(self, root: Path, smallest: int, spares: int = 0):
        nodes = tuple(range(3 + spares))
        job = Job(root, ("agents",), {LAUNCH_ID: "x"}, 6, 30.0, root / "logs", nodes=nodes)
        self.job = replace(job, num_nodes=3, allowed_nodes=range(smallest, 4))
        self.reports: list[str] = []
        self.nodes = CommandNodes(self.job, self.reports.append)
        self.nodes.hostnames = tuple(f"host{node}" for node in nodes)

    def lose(self, *lost: int) -> Job:
        gone = [NodeLost(node, f"host{node}", "is off", (0,)) for node in lost]
        self.nodes.hostnames = tuple("" if node in lost else name for node, name in enumerate(self.nodes.hostnames))
        self.job, _ = self.nodes.select(gone)
        return self.job


def test_a_command_continues_on_fewer_nodes_if_it_may(tmp_path: Path) -> None:
    command = Command(tmp_path, smallest=2)
    job = command.lose(1)
    assert (job.nodes, job.num_nodes, job.world_size) == ((0, 2, 1), 2, 4)
    assert "restarts on 2 nodes" in command.reports[0]


@pytest.mark.parametrize(("smallest", "lost"), [(3, (1,)), (2, (1, 2))])
def test_a_command_waits_for_nodes_without_which_it_may_not_run(tmp_path: Path, smallest: int, lost: Any) -> None:
    command = Command(tmp_path, smallest)
    job = command.lose(*lost)
    assert (job.nodes, job.num_nodes, job.world_size) == ((0, 1, 2), 3, 6)
    assert "waits" in command.reports[0]


def test_a_spare_takes_the_place_of_a_commands_lost_node(tmp_path: Path) -> None:
    command = Command(tmp_path, smallest=2, spares=1)
    job = command.lose(1)
    assert (job.nodes, job.num_nodes, job.world_size) == ((0, 2, 3, 1), 3, 6)
    assert "node 3 (host3)" in command.reports[0]


def test_a_spare_replaces_the_first_node_of_a_command_when_another_node_takes_over(tmp_path: Path) -> None:
    command = Command(tmp_path, smallest=3, spares=1)
    command.nodes.open(replace(command.job, nodes=(1, 2, 0, 3)), None)
    job, _ = command.nodes.select([NodeLost(0, "host0", "is not connected", ())])
    assert (job.nodes, job.num_nodes) == ((1, 2, 3, 0), 3)


def test_a_command_on_fewer_nodes_than_possible_asks_for_one_that_returned(tmp_path: Path) -> None:
    command = Command(tmp_path, smallest=2)
    command.nodes.open(command.lose(1), None)
    assert command.nodes.poll() == []
    command.nodes.hostnames = ("host0", "host2", "other")
    (returned,) = command.nodes.poll()
    assert isinstance(returned, NodeReturned) and returned.node == 1
    assert command.nodes.poll() == [], "not again at once"
    job, _ = command.nodes.select([returned])
    assert (job.nodes, job.num_nodes, job.world_size) == ((0, 2, 1), 3, 6)
