"""The backend of several nodes as the first of them sees it; the agents' ends of the wires are here."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from lab.agents import connect_agent

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import MachineError, WorkerError
from trainspec_cli.recipe.results.doctor import FAULTS, Check, NodeFault, NodeReport
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.nodes import backend as module
from trainspec_cli.run.backend.nodes.backend import Examination, NodesBackend, Reach, RecipeJobs
from trainspec_cli.run.channel.messages import (
    EndAgent,
    Goodbye,
    GroupExited,
    Hello,
    KillGroup,
    Message,
    NodeExamined,
    NodeRefuses,
    StartGroup,
    StopAsked,
    StopWorkers,
    WorkerExited,
    WorkersOrphaned,
)
from trainspec_cli.run.channel.wire import Wire
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.accounting import read_node_failures
from trainspec_cli.run.folder.event_types.events import Event as FolderEvent
from trainspec_cli.run.folder.event_types.events import NodeCheckedEvent, NodeFaultEvent
from trainspec_cli.run.folder.events import EventWriter
from trainspec_cli.run.folder.generations import UnplannedWork, read_secret
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.job import Job
from trainspec_cli.run.recovery.reliability import repeated_faults
from trainspec_cli.run.recovery.run_state import (
    AgentsFailed,
    Event,
    GroupEnded,
    NodeBack,
    NodeLost,
    NodesSeen,
    NodeStopRequested,
    NodeUnfit,
    Noted,
    Orphaned,
    PresenceChanged,
    WorkerFailed,
)

NOBODY = ("true",)
"""Instead of what starts agents."""
SOUND = NodeReport("a", 1.0, ())
FULL = NodeReport("a", 1.0, (Check("disk", "fail", "no space"),))
SLOW = NodeReport("a", 1.0, (Check("speed", "fail", "it is slow"),))


@pytest.fixture
def plan(make_plan) -> Plan:
    return replace(make_plan(), num_nodes=4, devices_per_node=2, replica_groups=2)


class Engine:
    """What has started the agents, and knows earlier than the hub which nodes are lost."""

    def __init__(self) -> None:
        self.losses: list[tuple[int, str]] = []
        self.ended: list[bool] = []

    def poll(self) -> None:
        return None

    def take_losses(self) -> list[tuple[int, str]]:
        losses, self.losses = self.losses, []
        return losses

    def end(self, *, in_order: bool, is_fenced: bool) -> None:
        self.ended.append(in_order)


class Lab:
    """A backend, and agents that are called one by one."""

    def __init__(
        self,
        root: Path,
        plan: Plan | None,
        start: tuple[str, ...] = NOBODY,
        nodes: tuple[int, ...] = (),
        left_out: tuple[int, ...] = (),
        join_timeout_s: float | None = None,
        job: Mapping[str, object] | None = None,
        **more: object,
    ):
        about = {"stop_grace_s": 1.0, "logs": root / "logs", "nodes": nodes, "left_out": left_out}
        about |= {"join_timeout_s": join_timeout_s, **(job or {})}
        self.job = Job(root, start, {LAUNCH_ID: "secret"}, world_size=8, **about)  # type: ignore[arg-type]
        reach = Reach("127.0.0.1", start, return_timeout_s=60.0)
        self.backend = NodesBackend(self.job, plan, **{"reach": reach, **more})  # type: ignore[arg-type]
        self.wires: list[Wire] = []
        self.events: list[Event] = []

    def call(self, *nodes: int) -> list[Wire]:
        for node in nodes:
            secret = read_secret(self.job.run.secret(self.backend.generation))
            wire = connect_agent(self.backend._hub, secret, self.poll)
            wire.send(Hello(node, f"host{node}"))
            self.wires.append(wire)
        return self.wires[-len(nodes) :]

    def poll(self) -> None:
        self.events += self.backend.poll()

    def wait_for(self, *events: Event) -> None:
        """Until all of these have come; they and what came before are forgotten."""
        self.wait_until(lambda: all(event in self.events for event in events))
        self.events.clear()

    def wait_until(self, holds: Callable[[], object]) -> None:
        while not holds():
            self.poll()
            time.sleep(0.01)

    def receive(self, wire: Wire) -> Message:
        received: list[Message] = []
        self.wait_until(lambda: received or received.extend(wire.receive()))
        assert len(received) == 1, received
        return received[0]

    def close(self) -> None:
        for wire in self.wires:
            wire.send(Goodbye())
        self.backend.kill()
        for wire in self.wires:
            wire.close()


@pytest.fixture
def open_lab(tmp_path: Path, plan: Plan) -> Iterator[Callable[..., Lab]]:
    opened: list[Lab] = []

    def make(plan: Plan | None = plan, **more: object) -> Lab:
        opened.append(Lab(tmp_path, plan, **more))  # type: ignore[arg-type]
        return opened[-1]

    yield make
    for lab in opened:
        lab.close()


@pytest.fixture
def lab(open_lab: Callable[..., Lab]) -> Lab:
    return open_lab()


@pytest.mark.parametrize(
    ("nodes", "groups", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_a_group_has_nodes_of_its_own_or_shares_one(plan: Plan, nodes: int, groups: int, expected) -> None:
    sized = replace(plan, num_nodes=nodes, replica_groups=groups)
    assert [list(sized.nodes_of_group(group)) for group in range(groups)] == expected


def test_a_group_starts_on_all_of_its_nodes_once_they_are_there(lab: Lab) -> None:
    third, fourth = lab.call(2, 3)
    lab.wait_for(PresenceChanged(0, "awaited"), PresenceChanged(1, "awaited"), PresenceChanged(1, "there"))
    lab.backend.start(1, 1)
    assert [lab.receive(wire) for wire in (third, fourth)] == [StartGroup(1, 1)] * 2


def test_nodes_that_stand_by_are_seen_and_nothing_else(open_lab: Callable[..., Lab], plan: Plan) -> None:
    """Two of the nodes 0 to 3 take part: 2 and 0; 3 is a spare one, 1 was left out."""
    lab = open_lab(replace(plan, num_nodes=2, replica_groups=1), nodes=(2, 0, 3), left_out=(1,))
    record = generations.read(lab.job.run, lab.backend.generation)
    assert record is not None and (record.num_nodes, record.nodes) == (2, (2, 0, 3, 1))
    agents = lab.call(0, 1, 3)
    lab.wait_for(NodesSeen(("host0", "host1", "", "host3")), PresenceChanged(0, "there"))
    lab.backend.start(0, 1)
    assert [lab.receive(wire) for wire in agents[:2]] == [StartGroup(0, 1)] * 2
    assert agents[2].receive() == []
    agents[2].close()
    lab.wait_until(lambda: lab.events)
    assert lab.events == [NodesSeen(("host0", "host1", "", ""))], "it is not lost to the run"
    lab.events.clear()
    agents[1].close()
    lab.wait_until(lambda: any(isinstance(event, NodeLost) for event in lab.events))
    (lost,) = (event for event in lab.events if isinstance(event, NodeLost))
    assert (lost.node, lost.hostname) == (0, "host1"), "by its number"


def waits_for(join_timeout_s: float, plan: Plan) -> Plan:
    spec = replace(plan.spec, run=replace(plan.spec.run, join_timeout_s=join_timeout_s))
    return replace(plan, spec=spec, num_nodes=2, replica_groups=1)


def test_nodes_that_do_not_come_are_lost_after_the_recipes_limit(open_lab: Callable[..., Lab], plan: Plan) -> None:
    lab = open_lab(waits_for(0.05, plan), nodes=(0, 1))
    lab.wait_until(lambda: sum(isinstance(event, NodeLost) for event in lab.events) == 2)
    (why,) = {event.why for event in lab.events if isinstance(event, NodeLost)}
    assert "0.05 s (run.join_timeout_s)" in why


class Unplanned(RecipeJobs):
    """A kind of job without a plan."""

    join_key = "--join-timeout-s"


def unplanned(join_timeout_s: float) -> dict[str, object]:
    work = UnplannedWork("command", "{}")
    return {"kind": Unplanned(), "describe_work": lambda port: work, "join_timeout_s": join_timeout_s}


def test_nodes_of_a_job_without_a_plan_that_do_not_come_are_lost_after_its_limit(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(None, nodes=(0, 1), **unplanned(0.05))
    lab.wait_until(lambda: sum(isinstance(event, NodeLost) for event in lab.events) == 2)
    (why,) = {event.why for event in lab.events if isinstance(event, NodeLost)}
    assert "0.05 s (--join-timeout-s)" in why


@pytest.mark.parametrize(("of_recipe", "key"), [(True, "run.join_timeout_s"), (False, "--join-timeout-s")])
def test_a_missing_node_is_named_once_another_is_there(
    open_lab: Callable[..., Lab], plan: Plan, of_recipe: bool, key: str
) -> None:
    if of_recipe:
        lab = open_lab(waits_for(1800.0, plan), nodes=(0, 1))
    else:
        lab = open_lab(None, nodes=(0, 1), **unplanned(1800.0))
    lab.call(0)
    lab.wait_until(lambda: any(isinstance(event, NodesSeen) and event.waiting for event in lab.events))
    (seen,) = (event for event in lab.events if isinstance(event, NodesSeen) and event.waiting)
    assert seen.hostnames == ("host0", "")
    assert seen.waiting.startswith("1 of 2 nodes ")
    assert "30 min" in seen.waiting and key in seen.waiting
    lab.events.clear()
    lab.call(1)
    lab.wait_until(lambda: any(isinstance(event, NodesSeen) for event in lab.events))
    assert [event.waiting for event in lab.events if isinstance(event, NodesSeen)] == [""]


def test_node_0_is_not_named_as_missing_where_another_node_comes_first(
    open_lab: Callable[..., Lab], plan: Plan
) -> None:
    lab = open_lab(waits_for(1800.0, plan), nodes=(0, 1))
    lab.call(1)
    lab.wait_until(lambda: any(isinstance(event, NodesSeen) for event in lab.events))
    assert [event.waiting for event in lab.events if isinstance(event, NodesSeen)] == [""]


def test_a_spare_node_that_never_came_is_not_waited_for_in_the_end(open_lab: Callable[..., Lab], plan: Plan) -> None:
    engine = Engine()
    reach = Reach("127.0.0.1", NOBODY, open_agents=lambda job, generation: engine)
    lab = open_lab(replace(plan, num_nodes=1, replica_groups=1), nodes=(0, 1), reach=reach)
    (agent,) = lab.call(0)
    lab.wait_for(PresenceChanged(0, "there"))
    agent.send(Goodbye())
    lab.backend.kill()
    assert engine.ended == [True]
    lab.wires.clear()
    lab.backend.kill = lambda: ()  # type: ignore[method-assign]


def test_a_node_is_lost_when_what_starts_its_agent_says_so(open_lab: Callable[..., Lab], plan: Plan) -> None:
    """Its connection is whole, as with a machine that was cut off."""
    engine = Engine()
    reach = Reach("127.0.0.1", NOBODY, open_agents=lambda job, generation: engine)
    lab = open_lab(replace(plan, num_nodes=2, replica_groups=1), nodes=(5, 3, 0), reach=reach)
    lab.call(0, 1)
    lab.wait_for(PresenceChanged(0, "there"))
    lab.backend.start(0, 1)
    engine.losses = [(3, "is dead"), (0, "is dead")]  # the last one is a spare that has not come
    lab.wait_for(NodeLost(3, "host1", "is dead", (0,)))
    engine.losses = [(3, "is dead")]
    lab.poll()
    assert [event for event in lab.events if isinstance(event, NodeLost)] == []


def test_a_presence_is_reported_when_it_changes_and_not_again(lab: Lab) -> None:
    lab.wait_for(PresenceChanged(0, "awaited"))
    lab.poll()
    assert lab.events == []


def test_a_failed_worker_and_what_is_left_of_its_group(lab: Lab) -> None:
    agents = lab.call(2, 3)
    lab.wait_for(PresenceChanged(1, "there"))
    lab.backend.start(1, 2)
    assert lab.receive(agents[0]) == StartGroup(1, 2)
    agents[0].send(WorkerExited(1, 1, 4, "of the start before"))
    agents[1].send(WorkerExited(1, 2, 7, "was killed by SIGKILL"))
    lab.wait_for(WorkerFailed(1))
    lab.backend.kill(1)
    assert lab.receive(agents[0]) == KillGroup(1, 2)
    agents[0].send(GroupExited(1, 2, None))
    agents[1].send(GroupExited(1, 1, None))
    lab.wait_until(lambda: not lab.backend._starts[1]._running - {3})
    assert lab.events == [], "the other node is not done with this start"
    agents[1].send(GroupExited(1, 2, None, (77,)))
    lab.wait_until(lambda: lab.events)
    (ended,) = lab.events
    assert isinstance(ended, GroupEnded)
    assert ended.headline.startswith("rank 7 (host3) ") and "SIGKILL" in ended.headline
    assert ended.left_behind == (77,)
    lab.backend.kill(1)  # nothing is left to be killed


def test_a_lost_node_takes_its_group_along_and_may_come_back(lab: Lab) -> None:
    agents = lab.call(0, 1, 2, 3)
    lab.wait_for(PresenceChanged(0, "there"), PresenceChanged(1, "there"))
    for group in (0, 1):
        lab.backend.start(group, 1)
    agents[3].close()
    lab.wait_until(lambda: len(lab.events) == 2)
    lost, away = lab.events
    assert isinstance(lost, NodeLost)
    assert (lost.node, lost.hostname, lost.groups) == (3, "host3", (1,))
    assert away == PresenceChanged(1, "awaited")
    agents[2].send(GroupExited(1, 1, None))
    lab.events.clear()
    lab.wait_until(lambda: lab.events)
    assert isinstance(lab.events[0], GroupEnded)
    assert lab.events[0].headline.startswith("node 3 (host3) closed")
    lab.call(3)
    lab.wait_for(NodeBack(3, "host3"), PresenceChanged(1, "there"))


def test_a_node_that_leaves_takes_its_group_along(lab: Lab) -> None:
    """Its agent lacked something when the group was started again, such as the way to the first node."""
    agents = lab.call(0, 1, 2, 3)
    lab.wait_for(PresenceChanged(0, "there"), PresenceChanged(1, "there"))
    lab.backend.start(1, 2)
    agents[3].send(NodeRefuses("no way", "hint"))
    agents[3].send(Goodbye())
    lab.wait_until(lambda: any(isinstance(event, NodeLost) for event in lab.events))
    lab.wait_for(
        NodeUnfit(3, "host3", "no way", "hint"), NodeLost(3, "host3", "no way", (1,)), PresenceChanged(1, "away")
    )
    agents[2].send(GroupExited(1, 2, None))
    lab.wait_until(lambda: lab.events)
    (ended,) = lab.events
    assert isinstance(ended, GroupEnded)
    assert (ended.done, ended.headline) == (False, "node 3 (host3) no way")


def test_where_nobody_can_start_an_agent_again_a_lost_node_is_not_waited_for(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(reach=Reach("127.0.0.1", NOBODY))
    agents = lab.call(2, 3)
    lab.wait_for(PresenceChanged(1, "there"))
    agents[1].close()
    lab.wait_for(PresenceChanged(1, "away"))


def test_a_group_is_done_when_all_of_its_nodes_are(lab: Lab) -> None:
    agents = lab.call(0, 1)
    lab.wait_for(PresenceChanged(0, "there"))
    lab.backend.start(0, 1)
    for agent in agents:
        agent.send(GroupExited(0, 1, 0))
    lab.wait_until(lambda: lab.events)
    (ended,) = lab.events
    assert isinstance(ended, GroupEnded) and ended.done


def test_requests_to_stop_go_both_ways(lab: Lab) -> None:
    agents = lab.call(0, 1, 2)
    lab.wait_for(PresenceChanged(0, "there"))
    lab.backend.start(0, 1)
    assert lab.receive(agents[0]) == StartGroup(0, 1)
    agents[1].send(WorkersOrphaned(0, 1))
    lab.wait_for(Orphaned(0))
    lab.backend.stop(0)
    assert lab.receive(agents[0]) == StopWorkers(0)
    agents[2].send(StopAsked())
    lab.wait_for(NodeStopRequested(2))
    lab.backend.stop()
    assert [lab.receive(agents[node]) for node in (0, 2)] == [StopWorkers(None)] * 2


def test_an_unfit_node_is_never_there(lab: Lab) -> None:
    agents = lab.call(0, 1)
    agents[0].send(NodeRefuses("no GPU"))
    lab.wait_for(NodeUnfit(0, "host0", "no GPU"))
    agents[0].send(Goodbye())
    lab.wait_for(PresenceChanged(0, "away"))


def test_agents_that_cannot_be_started_are_reported_once(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(start=("sh", "-c", "exit 3"))
    lab.wait_for(AgentsFailed(3))
    lab.poll()
    assert lab.events == []


def test_nodes_are_examined_before_they_are_there_and_one_that_comes_back_may_stay_away(
    open_lab: Callable[..., Lab], plan: Plan, tmp_path: Path
) -> None:
    def judge(reports) -> None:
        if any(report.checks for report in reports):
            raise MachineError("it is slow")

    lab = open_lab(replace(plan, num_nodes=2), examination=Examination(("examine",), judge))
    record = generations.read(lab.job.run, lab.backend.generation)
    assert record is not None and record.examine == ("examine",)
    agents = lab.call(0, 1)
    agents[0].send(NodeExamined(SOUND))
    lab.wait_until(lambda: lab.backend._hub.nodes[0].report)
    assert PresenceChanged(0, "there") not in lab.events, "the other is examined still"
    agents[1].send(NodeExamined(SOUND))
    lab.wait_for(PresenceChanged(0, "there"), PresenceChanged(1, "there"))
    assert [report["checks"] for report in json.loads((tmp_path / "preflight.json").read_text())] == [[], []]
    agents[1].close()
    lab.wait_for(PresenceChanged(1, "awaited"))
    (back,) = lab.call(1)
    back.send(NodeExamined(SLOW))
    lab.wait_for(NodeUnfit(1, "host1", "it is slow"))
    assert isinstance(lab.receive(back), EndAgent)


def test_where_all_nodes_are_new_an_unfit_one_ends_the_run(open_lab: Callable[..., Lab], plan: Plan) -> None:
    def judge(reports) -> None:
        raise MachineError("it is slow")

    lab = open_lab(replace(plan, num_nodes=2), examination=Examination(("examine",), judge))
    for agent in lab.call(0, 1):
        agent.send(NodeExamined(SOUND))
    with pytest.raises(MachineError, match="it is slow"):
        lab.wait_until(lambda: False)


def test_a_run_that_was_begun_anew_elsewhere_ends_here(lab: Lab) -> None:
    generations.begin(lab.job.run)
    with pytest.raises(WorkerError, match="fenced off"):
        lab.wait_until(lambda: False)


def test_in_the_end_every_agent_is_ended_and_waited_for(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    agents = lab.call(0, 1)
    lab.wait_for(PresenceChanged(0, "there"))
    monkeypatch.setattr(module, "END_TIMEOUT_S", 0.5)
    agents[0].send(Goodbye())
    began = time.monotonic()
    lab.backend._close()
    assert time.monotonic() - began >= 0.5, "for the one that does not answer"
    assert [type(one) for one in agents[1].receive()] == [EndAgent]
    assert not lab.job.run.secret(lab.backend.generation).exists()
    lab.wires.clear()
    lab.backend.kill = lambda: ()  # type: ignore[method-assign]


# Nodes that have failed twice for one cause


FALLEN = NodeFault("xid", "GPU 0000:3b:00", "Xid 79, the GPU has fallen off the bus")


def fail_twice(run: RunDir, host: str, *more: FolderEvent) -> None:
    """Note two failures of a node for one cause, and one of another node."""
    writer = EventWriter(run.supervisor_events, -1)
    for fault in (FALLEN, FALLEN):
        writer.write(NodeFaultEvent(host=host, fault=fault))
    writer.write(NodeFaultEvent(host="host0", fault=FALLEN))
    for event in more:
        writer.write(event)
    writer.close()


@pytest.fixture
def open_again(open_lab: Callable[..., Lab], plan: Plan, tmp_path: Path) -> Callable[..., Lab]:
    """Open the next start of a run on two nodes, of which host1 has failed twice."""

    def make(*more: FolderEvent, num_nodes: int = 2, **changes: object) -> Lab:
        fail_twice(RunDir(tmp_path), "host1", *more)
        only = replace(plan, num_nodes=num_nodes, replica_groups=1)
        job = {"survives_lost_nodes": True, "is_restart": True}
        return open_lab(only, job=job, **{"examination": Examination(("examine",), lambda reports: None), **changes})

    return make


def test_a_node_that_failed_twice_for_one_cause_is_not_used_again_unchecked(open_again: Callable[..., Lab]) -> None:
    lab = open_again()
    record = generations.read(lab.job.run, lab.backend.generation)
    assert record is not None and (record.examine, record.suspects) == (("examine",), ("host1",))
    agents = lab.call(0, 1)
    lab.wait_until(lambda: lab.backend._hub.nodes[0].admitted)
    assert not lab.backend._hub.nodes[1].admitted and PresenceChanged(0, "there") not in lab.events
    agents[1].send(NodeExamined(SOUND))
    lab.wait_for(PresenceChanged(0, "there"))
    assert repeated_faults(read_node_failures(lab.job.run)) == {}, "it may fail twice again"


@pytest.mark.parametrize("status", ["warn", "fail"])
def test_a_node_whose_check_finds_its_fault_again_is_left_out(open_again: Callable[..., Lab], status: str) -> None:
    lab = open_again()
    agents = lab.call(0, 1)
    agents[1].send(NodeExamined(NodeReport("host1", 1.0, (Check(FAULTS, status, FALLEN.text, "reboot it"),))))
    lab.wait_until(lambda: any(isinstance(event, NodeUnfit) for event in lab.events))
    (unfit,) = [event for event in lab.events if isinstance(event, NodeUnfit)]
    assert (unfit.node, unfit.hostname, unfit.hint) == (1, "host1", "reboot it")
    assert "2 times for the same cause (xid)" in unfit.why and FALLEN.text in unfit.why
    assert isinstance(lab.receive(agents[1]), EndAgent)
    assert repeated_faults(read_node_failures(lab.job.run)) == {"host1": ("xid", 2)}


def test_without_a_preflight_only_such_a_node_is_examined(open_again: Callable[..., Lab]) -> None:
    only = Examination(("examine",), lambda reports: pytest.fail("the others are not compared"), of_all=False)
    lab = open_again(examination=only)
    agents = lab.call(0, 1)
    lab.wait_until(lambda: lab.backend._hub.nodes[0].admitted)
    agents[1].send(NodeExamined(SOUND))
    lab.wait_for(PresenceChanged(0, "there"))


def test_a_command_has_no_check_so_such_a_node_is_used(open_again: Callable[..., Lab]) -> None:
    """Otherwise nothing could bring the node back."""
    lab = open_again(examination=None)
    lab.call(0, 1)
    lab.wait_for(PresenceChanged(0, "there"))


@pytest.mark.parametrize(("report", "is_sound"), [(SOUND, True), (FULL, True), (SLOW, False)])
def test_such_a_node_is_examined_while_it_stands_by(
    open_again: Callable[..., Lab], report: NodeReport, is_sound: bool
) -> None:
    """Until then it is no spare that the run could use."""

    def seen() -> tuple[str, ...]:
        return [event.hostnames for event in lab.events if isinstance(event, NodesSeen)][-1]

    lab = open_again(num_nodes=1, nodes=(0, 1))
    agents = lab.call(0, 1)
    lab.wait_until(lambda: PresenceChanged(0, "there") in lab.events)
    assert seen() == ("host0", "")
    agents[1].send(NodeExamined(report))
    if is_sound:
        lab.wait_until(lambda: seen() == ("host0", "host1"))
    else:
        lab.wait_until(lambda: any(isinstance(event, Noted) for event in lab.events))
        assert isinstance(lab.receive(agents[1]), EndAgent)
    assert not any(isinstance(event, NodeUnfit) for event in lab.events), "the run needs no other start"


def test_a_node_that_has_passed_its_check_is_used_at_once(open_again: Callable[..., Lab]) -> None:
    lab = open_again(NodeCheckedEvent(host="host1"))
    record = generations.read(lab.job.run, lab.backend.generation)
    assert record is not None and record.examine == ()
    lab.call(0, 1)
    lab.wait_for(PresenceChanged(0, "there"))
