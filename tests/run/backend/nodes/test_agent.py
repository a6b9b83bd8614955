"""An agent: how it handles the hub's messages, and when it reconnects to a hub that has gone silent."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError, RecipeError
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.recipe.results.doctor import NodeReport
from trainspec_cli.run.backend.nodes import agent, backend
from trainspec_cli.run.backend.nodes.agent import CUT_OFF, Agent
from trainspec_cli.run.backend.nodes.backend import NodePart
from trainspec_cli.run.channel.messages import (
    Beat,
    EndAgent,
    Goodbye,
    GroupExited,
    Hello,
    KillGroup,
    Message,
    NodeExamined,
    NodeRefuses,
    NumberTaken,
    ProcessMessage,
    StartGroup,
    StopAsked,
    StopWorkers,
)
from trainspec_cli.run.channel.wire import Wire
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim
from trainspec_cli.run.job.machine import NodePlace
from trainspec_cli.run.signals import PatientRequests


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "RETURN_INTERVAL_S", 0.0)


class FakeProcesses:
    """A replacement of `NodeProcesses` that records the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.messages: list[ProcessMessage] = []

    def start(self, group: int, number: int) -> None:
        self.calls.append(("start", group, number))

    def stop(self, group: int | None = None) -> None:
        self.calls.append(("stop", group))

    def kill(self, group: int) -> None:
        self.calls.append(("kill", group))

    def poll(self) -> list[ProcessMessage]:
        messages, self.messages = self.messages, []
        return messages

    def close(self) -> tuple[int, ...]:
        self.calls.append(("close",))
        return ()


class Lab:
    """An agent at work, whose hub says a message each time that it listens."""

    def __init__(self, root: Path, plan, monkeypatch: pytest.MonkeyPatch):
        agent_end, hub_end = socket.socketpair()
        self.hub, self.requests, self.processes = Wire(hub_end), PatientRequests(), FakeProcesses()
        self.hub.send(Beat())  # as the hub does when it takes an agent in
        self.script: list[Message | Callable[[], object]] = []
        record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(root), ("worker",), ())
        self.record = record
        self.agent = Agent(Wire(agent_end), RunDir(root), plan, record, 1, self.requests)
        monkeypatch.setattr(backend, "NodeProcesses", lambda *about, **more: self.processes)
        monkeypatch.setattr(agent.processes, "kill", lambda launch_id: [])
        monkeypatch.setattr(agent.time, "sleep", lambda seconds: self._next())

    def _next(self) -> None:
        assert self.script, "the agent does not end"
        step = self.script.pop(0)
        if callable(step):
            step()
        else:
            self.hub.send(step)


@pytest.fixture
def lab(tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    made = Lab(tmp_path, make_plan(), monkeypatch)
    yield made
    made.hub.close()


def test_an_agent_does_as_the_hub_asks_and_reports_until_it_is_ended(lab: Lab) -> None:
    lab.script = [
        StartGroup(0, 1),
        StopWorkers(0),
        lambda: lab.processes.messages.append(GroupExited(0, 1, 3)),
        StartGroup(0, 2),
        KillGroup(0, 1),
        KillGroup(0, 2),
        StopWorkers(None),
        EndAgent(),
    ]
    assert lab.agent.work() == 0
    calls = [("start", 0, 1), ("stop", 0), ("start", 0, 2), ("kill", 0), ("stop", None), ("close",)]
    assert lab.processes.calls == calls
    unknown_start = GroupExited(0, 1, None)
    assert lab.hub.receive() == [GroupExited(0, 1, 3), unknown_start, Goodbye()]


def test_a_node_that_failed_repeatedly_is_examined_while_it_stands_by(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    examined: list[int] = []
    monkeypatch.setattr(Agent, "_examine", lambda self: examined.append(self._node))
    lab.agent._record = replace(lab.record, examine=("examine",), suspects=(agent.node_name(),))
    lab.script = [EndAgent()]
    assert (lab.agent.stand_by(), examined) == (0, [1])


def test_an_agent_that_stands_by_runs_nothing_until_it_is_ended(lab: Lab) -> None:
    lab.script = [StartGroup(0, 1), StopWorkers(None), EndAgent()]
    assert lab.agent.stand_by() == 0
    assert (lab.processes.calls, lab.hub.receive()) == ([], [Goodbye()])


def test_an_agent_that_stands_by_leaves_where_it_is_asked_to_or_cut_off(lab: Lab) -> None:
    lab.script = [lab.requests.add]
    assert lab.agent.stand_by() == 0
    assert lab.hub.receive() == [Goodbye()], "the run is not asked to stop"
    lab.requests.count, lab.script = 0, [lab.hub.close]
    assert lab.agent.stand_by() == CUT_OFF


def test_an_agent_that_is_asked_to_stop_says_so_once_and_stops_its_workers(lab: Lab) -> None:
    lab.script = [lab.requests.add, lab.requests.add, StopWorkers(None), EndAgent()]
    assert lab.agent.work() == 0
    assert lab.processes.calls == [("stop", None), ("close",)]
    assert lab.hub.receive() == [StopAsked(), Goodbye()]


def test_an_agent_whose_hub_is_gone_ends_what_it_runs(lab: Lab) -> None:
    lab.script = [StartGroup(0, 1), lab.hub.close]
    assert lab.agent.work() == CUT_OFF
    assert lab.processes.calls == [("start", 0, 1), ("close",)]


@pytest.mark.parametrize(
    ("program", "reports"),
    [
        ('print(1); print(\'{"host": "a", "time": 2, "checks": []}\')', [NodeExamined(NodeReport("a", 2.0, ()))]),
        ("", []),
        ("print(1)", []),
    ],
)
def test_a_node_is_examined_before_anything_runs(
    tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch, program: str, reports: list[Message]
) -> None:
    agent_end, hub_end = socket.socketpair()
    record = GenerationRecord(*(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",)), ("-c", program))
    examined = Agent(Wire(agent_end), RunDir(tmp_path), make_plan(), record, 1, PatientRequests())
    hub = Wire(hub_end)
    if reports:
        examined._examine()
    else:
        with pytest.raises(MachineError, match="without a report"):
            examined._examine()
    assert hub.receive() == reports
    hub.close()


def test_a_node_that_lacks_something_refuses_and_leaves(
    tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_end, hub_end = socket.socketpair()
    hub, wire = Wire(hub_end), Wire(agent_end)
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), ())

    def lack(self: Agent) -> int:
        raise MachineError("no GPU\nhere", hint="install\nthe driver")

    monkeypatch.setattr(agent, "call_hub", lambda address, secret, timeout_s: wire)
    monkeypatch.setattr(agent, "read_secret", lambda path: b"")
    monkeypatch.setattr(Agent, "work", lack)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    told: list[str] = []
    assert agent._serve(RunDir(tmp_path), make_plan(), record, 1, PatientRequests(), told.append) == agent.UNFIT
    assert told == ["cannot take part: no GPU here"]
    assert hub.receive() == [Hello(1, "node7"), NodeRefuses("no GPU here", "install the driver"), Goodbye()]
    hub.close()


def unreachable(cause: OSError) -> MachineError:
    error = MachineError("no way")
    error.__cause__ = cause
    return error


def serving(*ends: int | MachineError) -> Callable[[], int]:
    """Each call ends as said; one call more than that fails the test."""
    left = list(ends)

    def serve() -> int:
        end = left.pop(0)
        if isinstance(end, MachineError):
            raise end
        return end

    return serve


@pytest.mark.parametrize(
    ("ends", "code"),
    [
        ((0,), 0),
        ((CUT_OFF, 0), 0),
        ((CUT_OFF, unreachable(TimeoutError()), CUT_OFF, unreachable(OSError()), 0), 0),
        ((CUT_OFF, unreachable(ConnectionRefusedError())), CUT_OFF),
    ],
)
def test_who_was_cut_off_comes_back_while_there_is_a_hub(ends: tuple[int | MachineError, ...], code: int) -> None:
    assert agent._keep_serving(serving(*ends), lambda: True, 60.0) == code


def test_nobody_comes_back_to_a_run_that_is_over() -> None:
    assert agent._keep_serving(serving(CUT_OFF), lambda: False, 60.0) == CUT_OFF


def test_the_first_nodes_word_is_waited_for_and_a_folder_that_is_not_shared_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, now = RunDir(tmp_path), [0.0]
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), ())

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if seconds and now[0] < 1.0:
            generations.begin(run)

    monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(agent.time, "sleep", sleep)
    with pytest.raises(MachineError, match=r"cannot see .*00000009\.json") as raised:
        agent.await_record(run, 9)
    assert raised.value.problems[0].code == "not_shared"
    assert now[0] == pytest.approx(agent.APPEAR_TIMEOUT_S, abs=2 * agent.POLL_S)
    monkeypatch.setattr(agent.time, "sleep", lambda seconds: generations.describe(run, record))
    assert agent.await_record(run, 1) == record


def test_a_hub_that_is_not_reached_is_named_with_the_way_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_hub(address: tuple[str, int], secret: bytes, timeout_s: float) -> Wire:
        assert (address, secret) == (("10.0.0.1", 77), b"secret")
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(agent, "call_hub", call_hub)
    record = GenerationRecord(1, 0.0, "a", "10.0.0.1", 77, {}, 2, "id", "logs", ("worker",), ())
    with raises(MachineError, "hub_unreachable", "10.0.0.1:77", "refused") as raised:
        agent.connect(record, b"secret", 1, 30.0)
    assert isinstance(raised.value.__cause__, ConnectionRefusedError), "by it the agent knows that the hub is gone"


def test_an_examination_without_an_end_is_given_up(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    sleeper = ("-c", "import time; time.sleep(600)")
    lab.agent._record = replace(lab.record, examine=sleeper)

    def sleep(seconds: float) -> None:
        assert now[0] < 2 * agent.EXAMINE_TIMEOUT_S, "it waits without end"
        now[0] += 10.0
        lab.hub.send(Beat())

    monkeypatch.setattr(agent.time, "sleep", sleep)
    monkeypatch.setattr(agent.time, "monotonic", lambda: now[0])
    with pytest.raises(MachineError, match=f"without a report within {agent.EXAMINE_TIMEOUT_S:g} s"):
        lab.agent._examine()
    assert now[0] >= agent.EXAMINE_TIMEOUT_S


@pytest.mark.parametrize("ending", ["another start", "a result", "a request to stop", "no owner"])
def test_an_agent_comes_back_until_its_start_is_over(
    tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    run = RunDir(tmp_path)
    write_json(run.plan_json, to_plain(replace(make_plan(), replica_groups=2)))
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), ())
    generations.describe(run, replace(record, generation=generations.begin(run)))
    went_on: list[bool] = []

    def keep_serving(serve: object, goes_on: Callable[[], bool], return_timeout_s: float, tell: object) -> int:
        assert return_timeout_s == 300.0
        went_on.append(goes_on())
        if ending == "another start":
            generations.begin(run)
        elif ending == "a result":
            write_json(run.result_json, {})
        elif ending == "no owner":
            owner.close()
        else:
            signal.raise_signal(signal.SIGTERM)
        went_on.append(goes_on())
        return 7

    monkeypatch.setattr(agent, "_keep_serving", keep_serving)
    owner = ExitStack()
    owner.enter_context(claim(run, "id"))
    with owner:
        assert agent.run_agent(run, 1, 1, first_may_change=lambda: True) == 7
    assert went_on == [True, False]


def test_an_agent_of_one_replica_group_serves_once(tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    write_json(run.plan_json, to_plain(make_plan()))
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), ())
    generations.describe(run, replace(record, generation=generations.begin(run)))
    monkeypatch.setattr(agent, "_serve", lambda run, plan, record, node, *_, **__: CUT_OFF if node == 5 else 0)
    monkeypatch.setattr(agent, "_keep_serving", lambda *_: pytest.fail("a step cannot go on without it"))
    assert agent.run_agent(run, 1, 5) == CUT_OFF


def test_a_node_has_its_place_in_each_start_or_stands_by(
    tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the nodes 0 to 3 take part; node 3 replaces node 1, which was left out."""
    run = RunDir(tmp_path)
    write_json(run.plan_json, to_plain(make_plan()))
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), (), (0, 3, 2, 1))
    generations.describe(run, replace(record, generation=generations.begin(run)))
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(agent, "read_secret", lambda path: b"")
    monkeypatch.setattr(agent, "connect", lambda record, secret, place, timeout_s: socket.socket())
    monkeypatch.setattr(Agent, "work", lambda self: found.append(("works", self._node)))
    monkeypatch.setattr(Agent, "stand_by", lambda self: found.append(("stands by", self._node)))
    for node in range(4):
        agent.run_agent(run, 1, node)
    assert found == [("works", 0), ("stands by", 3), ("stands by", 2), ("works", 1)]


def test_an_agent_whose_number_is_taken_starts_and_kills_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent.processes, "kill", lambda launch_id: pytest.fail("they are another agent's"))
    lab.hub.send(NumberTaken("elsewhere"))
    with raises(RecipeError, "usage", "--node-rank 1", "elsewhere", path="--node-rank"):
        lab.agent.work()
    assert lab.processes.calls == []


@pytest.mark.parametrize(
    ("serves_once", "standby", "keeps"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_an_agent_prepares_later_starts_if_it_will_serve_them(
    tmp_path: Path, make_plan, serves_once: bool, standby: bool, keeps: bool
) -> None:
    """An agent that Slurm starts serves one generation."""
    plan = make_plan()
    plan = replace(plan, spec=replace(plan.spec, resilience=ResilienceSpec(standby=standby)))
    record = GenerationRecord(1, 0.0, "a", "127.0.0.1", 1, {}, 2, "id", str(tmp_path), ("worker",), ())
    place = NodePlace(1, 2, "127.0.0.1")
    part = NodePart(RunDir(tmp_path), plan, record, place, Machine("host", 2, 2**30), serves_once)
    assert part.keeps_standby == keeps


SIGNS = ("an event", "an owner", "a result", "another start", "restarted", "too often")


@pytest.mark.parametrize("sign", ["none", *SIGNS])
def test_an_elastic_slurm_job_is_requeued_if_its_first_node_gives_no_sign_of_life(
    tmp_path: Path, make_plan, monkeypatch: pytest.MonkeyPatch, sign: str
) -> None:
    run = RunDir(tmp_path)
    write_json(run.plan_json, to_plain(replace(make_plan(), replica_groups=2)))
    generation = generations.begin(run)
    requeued: list[str] = []
    restarts = {"restarted": "1", "too often": "10"}.get(sign, "0")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "10" if sign == "too often" else "0")
    monkeypatch.setattr(agent.slurm, "show", lambda _: {"JobState": "RUNNING", "Restarts": restarts})
    monkeypatch.setattr(agent.slurm, "requeue", requeued.append)
    with ExitStack() as owner:

        def sleep(seconds: float) -> None:
            if seconds != agent.FIRST_NODE_TIMEOUT_S:
                return
            if sign == "an event":
                run.events(0).parent.mkdir(parents=True)
                run.events(0).write_text("{}\n")
            elif sign == "an owner":
                owner.enter_context(claim(run, "id"))
            elif sign == "a result":
                write_json(run.result_json, {})
            elif sign == "another start":
                generations.begin(run)

        monkeypatch.setattr(agent.time, "sleep", sleep)
        agent.requeue_without_first_node(run, generation, lambda _: None)
    assert requeued == (["7"] if sign == "none" else [])
