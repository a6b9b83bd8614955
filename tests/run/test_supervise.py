"""The supervisor on a backend in memory: what it does with each decision, and random histories of events."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from lab.events import stepped, write_event
from run.memory_backend import World

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.training import SchedulerSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.doctor import NodeFault
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tables import MemorySetting, Shortage
from trainspec_cli.run import supervise as module
from trainspec_cli.run.channel.messages import ExpectGroups, SpeedsReport
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import MemoryEvent, NodeFaultEvent
from trainspec_cli.run.folder.events import read_events, read_log
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import note_stop
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.recovery import RESTART_WINDOW_S
from trainspec_cli.run.recovery.run_state import (
    Begun,
    Event,
    HostFault,
    NodeBack,
    NodeLost,
    NodeReturned,
    NodeSlow,
    NodeStopRequested,
    NodeUnfit,
    Orphaned,
    PresenceChanged,
    RendezvousRestarted,
    Retried,
    Stepped,
    WorkerFailed,
)
from trainspec_cli.run.signals import StopRequests
from trainspec_cli.run.supervise import Ending, Supervisor, supervise

GRACE_S = 30.0


def a_job(root: Path) -> Job:
    logs = root / "logs" / "launch_01"
    logs.mkdir(parents=True)
    return Job(root, ("torchrun",), {LAUNCH_ID: "x"}, 2, GRACE_S, logs, worker=("worker",))


def with_resilience(plan: Plan, groups: int = 1, **resilience: object) -> Plan:
    mode = "elastic" if groups > 1 else "restart"
    spec = replace(plan.spec, resilience=ResilienceSpec(**{"mode": mode, **resilience}))  # type: ignore[arg-type]
    return replace(plan, spec=spec, replica_groups=groups)


def test_a_job_without_known_checkpoints_has_made_the_steps_of_its_earlier_starts(tmp_path: Path) -> None:
    """A start that fails before its first step has made none: it would come again."""
    job = replace(a_job(tmp_path), max_restarts=1)
    assert Supervisor(job, None, World, print).state.checkpoint_step == 0
    state = Supervisor(replace(job, earlier_steps=3), None, World, print).state
    assert (state.checkpoint_step, state.restarts_left) == (3, 1)


class Run:
    """`supervise` with a script: one function for each of the backend's polls, in order."""

    def __init__(self, root: Path, plan: Plan | None, groups: int = 1, presence: str = "there"):
        self.world, self.job, self.plan = World(groups, presence), a_job(root), plan
        self.requests, self.reports, self.watched = StopRequests(), [], []
        self.script: list[Callable[[], object]] = []

    def __call__(self) -> Ending:
        return supervise(self.job, self.plan, self._open, self._watch, self.reports.append, self.requests)

    def happen(self, *events: Event) -> Callable[[], None]:
        return lambda: self.world.backend.queue.extend(events)

    def _open(self, job: Job, plan: Plan | None):
        backend = self.world.open(job, plan)
        backend.on_poll = lambda: self.script.pop(0)() if self.script and self.world.live else None
        return backend

    def _watch(self, stop_requested: bool) -> None:
        self.watched.append(stop_requested)
        assert len(self.watched) < 500, "it does not end"


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))


@pytest.fixture
def run(tmp_path: Path, make_plan) -> Run:
    return Run(tmp_path, with_resilience(make_plan()))


@pytest.fixture
def pair(tmp_path: Path, make_plan) -> Run:
    return Run(tmp_path, with_resilience(make_plan(), groups=2, min_groups=2), groups=2)


def marks(run: Run) -> list[str]:
    return [event["type"] for event in read_events(run.job.run.supervisor_events)]


def test_a_run_that_ends_well(run: Run) -> None:
    run.script = [lambda: run.world.end(0, done=True)]
    ending = run()
    assert ending == Ending(run.job, 0, False, (), "", 1)
    assert (run.world.starts, run.world.backend.closed) == ([(1, 0, 1)], 1)
    assert marks(run) == ["launch", "ended"]
    assert run.watched[-1] is False


@pytest.mark.clause("LAUNCH-6")
def test_a_failed_run_begins_a_new_generation_from_its_checkpoint(run: Run) -> None:
    job = run.job
    for step in (4, 7):
        write_event(job.run.events(0), stepped(step))
    job.run.checkpoint(4).mkdir(parents=True)
    write_json(job.run.error(1), {"rank": 1})
    write_json(job.run.result_json, {"status": "failed"})
    run.world.checkpoint = 4
    run.script = [
        run.happen(WorkerFailed(0)),
        lambda: run.world.end(0, from_outside=True),
        lambda: run.world.end(0, done=True),
    ]
    ending = run()
    (report,) = run.reports
    assert report.startswith("it broke; ") and report.endswith("from step 4")
    assert run.world.starts == [(1, 0, 1), (2, 0, 2)]
    assert [backend.closed for backend in run.world.backends] == [1, 1]
    assert ending.job.logs == job.logs.with_name("launch_01_start002")
    assert str(ending.job.logs) in ending.job.command
    assert (ending.generation, ending.exit_code) == (2, 0)
    assert marks(run) == ["launch", "failure", "ended", "launch", "ended"]
    assert not job.run.result_json.exists()
    assert json.loads((job.logs / job.run.error(1).name).read_text()) == {"rank": 1}
    assert not job.run.error(1).exists()
    recoveries = [event for event in read_events(job.run.events(0)) if event["type"] == "recovery"]
    assert [(event["change"], event["step"], event["lost_steps"]) for event in recoveries] == [("restart", 7, 3)]


def test_a_run_whose_memory_ran_out_leaves_its_next_start_what_to_take(tmp_path: Path, make_plan) -> None:
    four, two = (MemorySetting(size, "none", "none") for size in (4, 2))
    run = Run(tmp_path, replace(with_resilience(make_plan()), memory_ladder=(four, two)))
    write_event(run.job.run.events(0), stepped(5))
    run.job.run.checkpoint(5).mkdir(parents=True)
    run.world.checkpoint = 5
    run.script = [
        lambda: run.world.end(0, foreseen=True, shortage=Shortage(four, "tp=2", used_bytes=9, limit_bytes=8)),
        lambda: run.world.end(0, done=True),
    ]
    assert run().exit_code == 0
    (report,) = run.reports
    assert report.startswith("it broke; ") and "from step 5 with micro-batches of 2 " in report
    (written,) = read_log(run.job.run.directives)
    assert isinstance(written, MemoryEvent)
    assert written.layout == "tp=2", "the setting that ran out of memory, not the first one of the run"
    assert (written.failed, written.taken, written.restarts, written.was_killed) == (four, two, True, False)
    assert (written.step, written.lost_steps, written.used_bytes, written.limit_bytes) == (5, 0, 9, 8)
    assert written.rank == -1, "the supervisor wrote it"


def test_a_run_goes_on_without_a_slow_node(tmp_path: Path, make_plan) -> None:
    """One of three is four times as slow: its workers stop with a checkpoint, and two start again from there."""
    plan = with_resilience(make_plan(), max_restarts_per_hour=0)
    sizes = {"train": replace(plan.spec.train, max_steps=1000), "scheduler": SchedulerSpec(mode="auto")}
    spec = replace(plan.spec, batching=replace(plan.spec.batching, global_batch_size=3), **sizes)
    plan = replace(plan, spec=spec, num_nodes=3, devices_per_node=1, layout=Layout(dp_replicate=3))
    run, opened = Run(tmp_path, plan), list[Plan | None]()
    run.job = replace(run.job, nodes=(0, 1, 2), worker=())
    write_json(run.job.run.plan_json, to_plain(plan))
    open_backend = run._open

    def make_steps(*steps: int) -> None:
        for step in steps:
            write_event(run.job.run.events(0), replace(stepped(step), step_time_s=5.0))

    def become_slow() -> None:
        each = {"samples": (1, 1, 1), "fixed_s": (0.0,) * 3, "per_sample_s": (1.0, 4.0, 1.0), "micro_batches": 1}
        run.world.backend.hub.speeds = SpeedsReport(step=3, step_s=4.0, layout=plan.layout, **each)  # type: ignore[arg-type]

    def open_and_note(job: Job, plan: Plan | None):
        opened.append(plan)
        return open_backend(job, plan)

    def stop() -> None:
        run.world.checkpoint = 20
        write_json(run.job.run.result_json, {"status": "stopped"})
        run.world.end(0, exit_code=6)

    def replan(plan: Plan, nodes: int) -> Plan:
        return replace(plan, num_nodes=nodes, layout=Layout(dp_replicate=nodes))

    run.script = [
        run.happen(Begun(0), Stepped(0)),
        lambda: (make_steps(1, 2, 3), become_slow()),
        lambda: make_steps(4),
        lambda: make_steps(*range(5, 20)),
        stop,
        lambda: run.world.end(0, done=True),
    ]
    ending = supervise(run.job, plan, open_and_note, run._watch, run.reports.append, run.requests, replan)
    assert (ending.exit_code, ending.stop_requested, ending.generation) == (0, False, 2)
    assert (run.world.stops, run.world.starts) == ([None], [(1, 0, 1), (2, 0, 2)])
    assert [(job.nodes, job.left_out, job.world_size) for job in run.world.jobs] == [
        ((0, 1, 2), (), 2),
        ((0, 2), (1,), 2),
    ]
    assert [plan and plan.num_nodes for plan in opened] == [3, 2]
    assert "restarts without it" in run.reports[0]
    assert marks(run) == ["launch", "ended", "launch", "ended"], "that was no failure"


def test_a_tool_is_never_started_again(tmp_path: Path) -> None:
    run = Run(tmp_path, None)
    run.world.checkpoint = 4
    run.script = [lambda: run.world.end(0, from_outside=True)]
    assert run().exit_code == 1
    assert (len(run.world.starts), run.reports) == (1, [])


@pytest.mark.clause("LAUNCH-6")
def test_a_checkpoint_that_was_there_before_is_no_progress(run: Run) -> None:
    run.job.run.checkpoint(4).mkdir(parents=True)
    run.world.checkpoint = 4
    run.script = [lambda: run.world.end(0, own_error=True)]
    run()
    assert len(run.world.starts) == 1


@pytest.mark.clause("LAUNCH-7")
def test_a_request_to_stop_reaches_the_workers_and_is_reported_to_the_view(run: Run) -> None:
    run.world.answers_stop = True
    run.script = [run.happen(Begun(0)), run.requests.add]
    ending = run()
    assert (run.world.stops, ending.stop_requested) == ([None], True)
    assert run.watched[-1] is True


@pytest.mark.clause("LAUNCH-7")
def test_deaf_workers_are_killed_at_the_deadline(run: Run) -> None:
    run.script = [run.happen(Begun(0)), run.requests.add]
    ending = run()
    assert (ending.stop_requested, ending.exit_code, run.world.live) == (True, None, {})
    assert len(run.watched) * module.POLL_S > GRACE_S


def test_a_second_request_and_one_before_the_first_event_kill_at_once(run: Run) -> None:
    run.script = [run.requests.add]
    assert run().stop_requested
    assert (run.world.stops, len(run.watched) < 6) == ([], True)


def test_a_stop_that_only_the_run_folder_knows_of_counts(run: Run) -> None:
    run.script = [lambda: (note_stop(run.job.run, 1), run.world.end(0))]
    assert run().stop_requested


def test_a_stop_while_the_run_waits_leaves_the_errors_where_they_are(run: Run) -> None:
    write_json(run.job.run.error(1), {"rank": 1})
    run.world.checkpoint = 4
    run.script = [lambda: (run.requests.add(), run.world.end(0, from_outside=True))]
    assert run().stop_requested
    assert run.job.run.error(1).exists()
    assert len(run.world.backends) == 1


def test_a_backend_that_fails_is_closed(run: Run) -> None:
    def break_down() -> None:
        raise MachineError("no way")

    run.script = [break_down]
    with pytest.raises(MachineError, match="no way"):
        run()
    assert (run.world.backend.closed, marks(run)) == (1, ["launch", "ended"])


def test_a_generation_that_cannot_be_begun_ends_the_run_with_its_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(supervisor: Supervisor) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Supervisor, "_begin_generation", refuse)
    run.world.checkpoint = 7
    run.script = [run.happen(Stepped(0)), lambda: run.world.end(0, from_outside=True)]
    with pytest.raises(OSError, match="No space left"):
        run()
    assert (run.world.backend.closed, marks(run)) == (1, ["launch", "ended"])


def on_three_nodes(root: Path, plan: Plan, **job: object) -> Run:
    run = Run(root, replace(plan, num_nodes=3, devices_per_node=1, layout=Layout(dp_replicate=3)))
    run.job = replace(run.job, nodes=(0, 1, 2), survives_lost_nodes=True, worker=(), **job)
    write_json(run.job.run.plan_json, to_plain(run.plan))
    run.world.checkpoint = 5
    return run


def fewer(plan: Plan, nodes: int) -> Plan:
    return replace(plan, num_nodes=nodes, layout=Layout(dp_replicate=nodes))


@pytest.mark.parametrize(
    ("response", "replan", "limits"),
    [
        ("continue", fewer, [None, 45.0, 45.0]),
        ("continue", None, [None, 45.0, None]),
        ("wait", fewer, [None, None, None]),
    ],
    ids=["fewer nodes", "no layout for fewer", "waits"],
)
def test_a_node_that_should_be_there_is_not_awaited_as_long_as_one_that_is_lost(
    tmp_path: Path, make_plan, response: str, replan, limits: list[float | None]
) -> None:
    """It may have died together with another node. The starts: the first, one after a failure, and one after a loss."""
    plan = with_resilience(make_plan(), after_node_loss=response)
    plan = replace(plan, spec=replace(plan.spec, run=replace(plan.spec.run, node_timeout_s=45.0)))
    run = on_three_nodes(tmp_path, plan)
    run.script = [
        run.happen(Begun(0), Stepped(0)),
        lambda: run.world.end(0, from_outside=True),
        run.happen(NodeLost(2, "c", "is off", (0,))),
        lambda: run.world.end(0, from_outside=True),
        lambda: run.world.end(0, done=True),
    ]
    supervise(run.job, run.plan, run._open, run._watch, run.reports.append, run.requests, replan)
    assert [job.rejoin_s for job in run.world.jobs] == limits


@pytest.mark.parametrize(("replan", "limit"), [(fewer, 30.0), (None, None)])
def test_nodes_that_do_not_join_a_run_that_was_taken_over_are_lost_soon(
    tmp_path: Path, make_plan, replan, limit: float | None
) -> None:
    run = on_three_nodes(tmp_path, with_resilience(make_plan()), lost=((2, "c"),))
    run.script = [lambda: run.world.end(0, done=True)]
    supervise(run.job, run.plan, run._open, run._watch, run.reports.append, run.requests, replan)
    assert [job.rejoin_s for job in run.world.jobs] == [limit]


def test_a_lost_node_is_written_down_and_ends_a_run_of_one_group(run: Run) -> None:
    generations.begin(run.job.run)
    run.script = [run.happen(NodeLost(1, "b", "is off", (0,)), NodeUnfit(0, "a", "no GPU", "install the driver"))]
    run()
    errors = [json.loads(run.job.run.node_error(node).read_text()) for node in (0, 1)]
    keys = ("node", "host", "lost", "message", "hint")
    assert [tuple(error[key] for key in keys) for error in errors] == [
        (0, "a", False, "no GPU", "install the driver"),
        (1, "b", True, "is off", ""),
    ]


def test_a_node_that_fails_twice_for_one_cause_is_written_down_and_reported(tmp_path: Path, make_plan) -> None:
    run = Run(tmp_path, with_resilience(replace(make_plan(), num_nodes=2)))
    run.job = replace(run.job, nodes=(0, 1), survives_lost_nodes=True)
    faults = (HostFault("b", NodeFault("xid", "GPU 3", "Xid 79")), HostFault("b", NodeFault("program", "GPU 3", "31")))
    run.world.checkpoint = 5
    run.script = [
        lambda: run.world.end(0, from_outside=True, faults=faults),
        lambda: run.world.end(0, from_outside=True, faults=faults),
        lambda: run.world.end(0, done=True),
    ]
    run()
    noted = [one for one in read_log(run.job.run.supervisor_events) if isinstance(one, NodeFaultEvent)]
    assert [(one.host, one.fault.cause) for one in noted] == [("b", "xid"), ("b", "program")] * 2
    (said,) = [report for report in run.reports if "2 times" in report]
    assert said.startswith("b has failed 2 times for the same cause (Xid 79)")


@pytest.mark.parametrize("done", [True, False])
def test_what_has_ended_already_is_not_stopped(run: Run, done: bool) -> None:
    """The request arrives at the same instant; it is handled after the events of the backend."""

    def end() -> None:
        run.world.end(0, done=done, exit_code=0 if done else 1)
        run.requests.add()

    run.script = [run.happen(Stepped(0)), end]
    ending = run()
    assert (ending.stop_requested, ending.exit_code) == (False, 0 if done else 1)


def test_a_start_that_was_fenced_off_writes_down_no_node(run: Run) -> None:
    generations.begin(run.job.run)
    generations.begin(run.job.run)
    run.script = [run.happen(NodeLost(1, "b", "is off", (0,)))]
    run()
    assert not run.job.run.node_error(1).exists()


def test_a_group_that_fails_is_started_again_beside_the_other(pair: Run) -> None:
    write_json(pair.job.run.error(2), {"rank": 2})
    write_json(pair.job.run.error(0), {"rank": 0})
    pair.plan = replace(pair.plan, devices_per_node=4)
    pair.script = [
        pair.happen(Stepped(0), Stepped(1)),
        pair.happen(WorkerFailed(1)),
        lambda: None,
        lambda: pair.world.end(0, done=True),
        lambda: pair.world.end(1, done=True),
    ]
    ending = pair()
    assert pair.world.starts == [(1, 0, 1), (1, 1, 1), (1, 1, 2)]
    assert [report.partition(";")[0] for report in pair.reports] == ["group 1: it broke"]
    assert (ending.exit_code, ending.generation, ending.given_up) == (0, 1, "")
    assert (pair.job.logs / "group00001_start001" / pair.job.run.error(2).name).exists()
    assert pair.job.run.error(0).exists(), "that of the other group stays"
    assert marks(pair) == ["launch", "ended"]


def test_too_few_groups_end_the_run_and_the_lost_node_is_named(pair: Run) -> None:
    pair.world.answers_stop = True
    lost = (NodeLost(1, "b", "is off", (1,)), NodeLost(5, "e", "is off", ()), NodeBack(5), PresenceChanged(1, "away"))
    pair.script = [pair.happen(Stepped(0)), pair.happen(*lost)]
    ending = pair()
    assert ending.given_up.startswith("1 of 2 replica groups ") and "resilience.min_groups is 2" in ending.given_up
    assert (pair.world.stops, ending.stop_requested) == ([None], False)
    assert pair.world.backend.hub.told == [(ExpectGroups(2), None), (ExpectGroups(1), None)]
    assert (pair.job.run.node_error(1).exists(), pair.job.run.node_error(5).exists()) == (True, False)


def test_a_run_that_cannot_begin_is_refused(tmp_path: Path, make_plan) -> None:
    run = Run(tmp_path, with_resilience(make_plan(), groups=2), groups=2, presence="awaited")
    open_backend = run._open

    def open_unfit(job: Job, plan: Plan | None):
        backend = open_backend(job, plan)
        backend.queue.append(NodeUnfit(1, "b", "no GPU", "install the driver"))
        return backend

    with pytest.raises(MachineError, match=r"node 1 \(b\): no GPU") as caught:
        supervise(run.job, run.plan, open_unfit)
    assert (caught.value.problems[0].code, caught.value.problems[0].hint) == ("unfit_host", "install the driver")
    assert run.world.backend.closed == 1


class LeftOut:
    """Counts the nodes that are left out; the tests say which are slow."""

    def __init__(self, supervisor: Supervisor):
        self.supervisor, self.nodes = supervisor, list[int]()

    def open(self, job: Job, plan: Plan) -> None:
        self.given = job, plan

    def poll(self) -> tuple[()]:
        return ()

    def select(self, reasons: Sequence[NodeSlow | NodeLost | NodeReturned]) -> tuple[Job, Plan]:
        self.nodes += [one.node for one in reasons if isinstance(one, NodeSlow)]
        return self.given


class Histories(RuleBasedStateMachine):
    """Whatever happens, in whichever order."""

    @initialize(groups=st.integers(1, 3), limit=st.integers(0, 3), min_groups=st.integers(1, 3), data=st.data())
    def begin(self, groups: int, limit: int, min_groups: int, data: st.DataObject) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.limit, self.now_s, self.requests = limit, 0.0, StopRequests()
        self.world, self.starts_s = World(groups, data.draw(st.sampled_from(["there", "awaited"]))), []
        self.world.checkpoint = data.draw(st.sampled_from([0, 10, 20]), label="checkpoint")
        self.last = data.draw(st.sampled_from(["fail", "stop", "stop, fail"]), label="what happens in the end")
        self.ended_well: set[int] = set()
        self.reports: list[str] = []
        resilience = {"max_restarts_per_hour": limit, "min_groups": min(min_groups, groups)}
        plan = with_resilience(PLAN, groups, **resilience)
        self.supervisor = Supervisor(a_job(self.folder), plan, self.world.open, self.reports.append)
        self.supervisor._nodes = self.run_nodes = LeftOut(self.supervisor)  # type: ignore[assignment]
        self.supervisor.open()
        self.turn()

    @property
    def over(self) -> bool:
        return self.supervisor.state.is_over

    def turn(self, after_s: float = 0.1) -> None:
        self.now_s += after_s
        seen, before = len(self.world.starts), self.supervisor.state
        if not before.is_over:
            self.supervisor.turn(self.now_s, self.requests)
        self.starts_s += [(self.now_s, *start) for start in self.world.starts[seen:]]
        assert not (before.is_ending and self.world.starts[seen:]), "started when the run was ending"

    def happen(self, *events: Event) -> None:
        self.world.backend.queue.extend(events)
        self.turn()

    def a_group(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, self.world.groups - 1), label="group")

    @rule(seconds=st.sampled_from([0.1, 1.0, 11.0, 70.0, 1500.0]))
    def time_passes(self, seconds: float) -> None:
        self.turn(seconds)

    @rule(data=st.data(), kind=st.sampled_from([Begun, Stepped, Stepped, Retried, WorkerFailed, Orphaned]))
    def workers_are_seen(self, data: st.DataObject, kind: type) -> None:
        if (group := self.a_group(data)) in self.world.live:
            self.happen(kind(group))

    @rule(data=st.data(), outside=st.booleans(), foreseen=st.sampled_from([False, False, False, True]))
    def a_group_fails(self, data: st.DataObject, outside: bool, foreseen: bool) -> None:
        if (group := self.a_group(data)) in self.world.live:
            self.world.end(group, from_outside=outside, own_error=not outside, foreseen=foreseen)
            self.turn()

    @rule(data=st.data())
    def a_group_ends_well(self, data: st.DataObject) -> None:
        if (group := self.a_group(data)) in self.world.live:
            self.ended_well.add(group)
            self.world.end(group, done=True)
            self.turn()

    @rule()
    def a_checkpoint_is_written(self) -> None:
        self.world.checkpoint += 10

    @rule(data=st.data())
    def a_node_is_lost(self, data: st.DataObject) -> None:
        group = self.a_group(data)
        self.happen(
            NodeLost(group, "node", "is off", (group,) if group in self.world.live else ()),
            PresenceChanged(group, data.draw(st.sampled_from(["awaited", "away"]))),
        )

    @rule(data=st.data())
    def a_node_comes_back(self, data: st.DataObject) -> None:
        group = self.a_group(data)
        self.happen(NodeBack(group), PresenceChanged(group, "there"))

    @rule(node=st.integers(0, 4))
    def a_node_is_slow(self, node: int) -> None:
        self.happen(NodeSlow(node, "node", "it is slow"))

    @rule(data=st.data())
    def workers_end_as_they_were_asked_to(self, data: st.DataObject) -> None:
        if (group := self.a_group(data)) in self.world.live and self.world.stops:
            self.world.checkpoint += 10
            self.world.end(group, exit_code=6)
            self.turn()

    @rule()
    def the_rendezvous_server_ends(self) -> None:
        self.happen(RendezvousRestarted())

    @rule(times=st.sampled_from([0, 0, 0, 1, 2]))
    def a_person_asks(self, times: int) -> None:
        self.requests.count = max(self.requests.count, times)
        self.turn()

    @rule(unlikely=st.sampled_from([False, False, False, True]))
    def an_agent_is_asked(self, unlikely: bool) -> None:
        if unlikely:
            self.happen(NodeStopRequested(0))

    @rule()
    @precondition(lambda self: self.over)
    def nothing_follows_the_end(self) -> None:
        live = dict(self.world.live)
        self.turn(10_000.0)
        assert self.world.live == live

    @invariant()
    def no_group_is_started_too_often(self) -> None:
        for group in range(self.world.groups):
            restarts = [at for at, _, started, number in self.starts_s if started == group and number > 1]
            for at in restarts:
                recent = sum(at <= other < at + RESTART_WINDOW_S for other in restarts)
                assert recent <= self.limit + len(self.run_nodes.nodes)

    @invariant()
    def a_node_is_left_out_once(self) -> None:
        assert len(set(self.run_nodes.nodes)) == len(self.run_nodes.nodes)
        assert not (self.run_nodes.nodes and self.world.groups > 1), "these keep theirs"

    @invariant()
    def what_lives_is_known_to_live(self) -> None:
        if self.starts_s and not self.over:
            phases = [group.phase for group in self.supervisor.state.groups]
            assert set(self.world.live) <= {n for n, phase in enumerate(phases) if phase in ("running", "ending")}

    @invariant()
    def a_lost_run_is_not_done(self) -> None:
        if self.world.backends:
            groups = self.supervisor.state.groups
            assert {n for n, group in enumerate(groups) if group.phase == "done"} <= self.ended_well

    def teardown(self) -> None:
        """Workers fail again and again, or ignore a request to stop: it ends, and nothing lives."""
        if not self.world.backends:
            return
        if not self.over:
            self.happen(*map(Begun, self.world.live))
        self.requests.count = max(self.requests.count, int("stop" in self.last))
        for _ in range(2 * int(GRACE_S / 10) + 20 * self.world.groups):
            self.world.checkpoint += 10
            for group in tuple(self.world.live) if "fail" in self.last else ():
                self.world.end(group, from_outside=True)
            if not self.over and not self.world.live:
                for group in range(self.world.groups):
                    self.world.backend.queue.append(PresenceChanged(group, "there"))
            self.turn(10.0)
            self.no_group_is_started_too_often()
        assert self.over, self.supervisor.state
        self.supervisor.close()
        assert self.world.live == {}
        assert all(backend.closed == 1 for backend in self.world.backends)
        shutil.rmtree(self.folder)


@pytest.fixture(autouse=True)
def plan_of_histories(make_plan) -> None:
    global PLAN
    PLAN = make_plan()


HISTORIES = settings(
    max_examples=80,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking a failure would take minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
@pytest.mark.clause("LAUNCH-6")
def test_random_histories() -> None:
    run_state_machine_as_test(Histories, settings=HISTORIES)
