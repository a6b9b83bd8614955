"""The processes of a node: what those of a replica group are given, and what becomes of them on real torchrun."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from lab.waiting import wait_for

from trainspec_cli.core.environment_names import GROUP, START
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import local, processes
from trainspec_cli.run.backend.local import NodeProcesses
from trainspec_cli.run.channel.messages import (
    GroupExited,
    ProcessMessage,
    WorkerExited,
    WorkersOrphaned,
)
from trainspec_cli.run.folder.generations import GenerationRecord, was_stop_noted
from trainspec_cli.run.job import job as job_module
from trainspec_cli.run.job.job import Job, build_node_job, devices_of, group_job
from trainspec_cli.run.job.machine import NodePlace

STANDIN = str(Path(__file__).parents[1] / "standin_worker.py")
HERE = "127.0.0.1"
LAUNCH = f"token-{os.getpid()}-1"


@pytest.mark.parametrize(
    ("shown", "of_groups"),
    [(None, ["0,1", "2,3"]), ("4,5,6,7", ["4,5", "6,7"]), ("GPU-a,GPU-b,GPU-c,GPU-d", ["GPU-a,GPU-b", "GPU-c,GPU-d"])],
)
def test_groups_of_one_node_divide_the_gpus_that_they_are_shown(
    shown: str | None, of_groups: list[str], make_plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    plan = replace(make_plan(), device="cuda", num_nodes=2, devices_per_node=4, replica_groups=4)
    for group in range(4):
        assert devices_of(plan, group) == {"CUDA_VISIBLE_DEVICES": of_groups[group % 2]}


def test_a_group_with_nodes_of_its_own_takes_all_their_gpus(make_plan) -> None:
    plan = replace(make_plan(), device="cuda", num_nodes=2, devices_per_node=4, replica_groups=2)
    assert devices_of(plan, 1) == {}


def test_a_run_of_one_group_is_the_job_itself(make_job, make_plan) -> None:
    job = make_job("endless")
    assert group_job(job, make_plan(), 0, 3) is job
    assert group_job(job, None, 0, 3) is job


@pytest.mark.parametrize(("group", "node", "ranks"), [(0, 0, [0, 1]), (0, 1, [2, 3]), (1, 2, [4, 5]), (1, 3, [6, 7])])
def test_a_node_has_its_part_of_a_group_and_its_number_within_it(
    make_job, make_plan, group: int, node: int, ranks: list[int]
) -> None:
    plan = replace(make_plan(), num_nodes=4, devices_per_node=2, replica_groups=2)
    job = replace(make_job("endless"), logs=Path("logs/launch_01/node00009"))
    part = group_job(job, plan, group, 2, NodePlace(node, 4, HERE))
    assert list(part.ranks or ()) == ranks
    assert part.logs == Path(f"logs/launch_01/group{group:05d}_start002/node00009")
    assert (part.environment[GROUP], part.environment[START]) == (str(group), "2")
    command = " ".join(part.command)
    assert f"--nnodes 2 --rdzv-conf node={node % 2} --nproc-per-node 2" in command
    assert f"--rdzv-id group{group:05d}_start002" in command


class Node:
    """The second of two nodes, with a replica group of one rank; or one node with a run of one group."""

    def __init__(self, job: Job, plan: Plan | None, place: NodePlace | None):
        self.job, self.processes = job, NodeProcesses(job, plan, place)
        self._received: list[ProcessMessage] = []

    def receive(self, kind: type) -> ProcessMessage:
        """The next message, which has to be of this kind."""
        wait_for(lambda: self._received or self._received.extend(self.processes.poll()))
        assert isinstance(self._received[0], kind), self._received
        return self._received.pop(0)

    def workers(self, count: int) -> list[psutil.Process]:
        wait_for(lambda: len(processes.workers(LAUNCH)) == count)
        return processes.workers(LAUNCH)


@pytest.fixture
def open_node() -> Iterator[Callable[..., Node]]:
    opened: list[Node] = []

    def make(job: Job, plan: Plan | None = None, place: NodePlace | None = None) -> Node:
        opened.append(Node(job, plan, place))
        return opened[-1]

    yield make
    for node in opened:
        assert node.processes.close() == ()
    assert processes.members(LAUNCH) == []


@pytest.fixture
def second(open_node, make_plan, machine, tmp_path: Path) -> Node:
    plan, place = replace(make_plan(), num_nodes=2, devices_per_node=1, replica_groups=2), NodePlace(1, 2, HERE)
    record = GenerationRecord(
        generation=1,
        at=0.0,
        host=HERE,
        head=HERE,
        hub_port=0,
        rendezvous={},
        num_nodes=2,
        launch_id=LAUNCH.removesuffix("-1"),
        logs=str(tmp_path / "run" / "logs"),
        worker=(STANDIN, "endless"),
        examine=(),
    )
    job = build_node_job(plan, tmp_path / "run", machine, 1, record)
    return open_node(job, plan, place)


@pytest.fixture
def only(open_node, make_job) -> Callable[[str], Node]:
    def make(mode: str) -> Node:
        job = make_job(mode)
        environment = {**job.environment, "TRAINSPEC_LAUNCH_ID": LAUNCH, "TRAINSPEC_GENERATION": "1"}
        return open_node(replace(job, environment=environment))

    return make


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_of_two_groups_on_a_node_one_is_ended_alone(
    open_node, make_job, make_plan, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "torchrun_command", lambda *_: ("env", "RANK=0", "sleep", "600"))
    job, plan = make_job("endless"), replace(make_plan(), replica_groups=2)
    node = open_node(replace(job, environment={**job.environment, "TRAINSPEC_LAUNCH_ID": LAUNCH}), plan)
    for group in range(2):
        node.processes.start(group, 1)
    wait_for(lambda: {worker.name() for worker in node.workers(2)} == {"sleep"})
    getattr(node.processes, end)(1)
    messages = []
    wait_for(lambda: messages.extend(node.processes.poll()) or GroupExited in map(type, messages))
    assert {message.group for message in messages} == {1}
    (left,) = processes.workers(LAUNCH)
    assert left.environ()[GROUP] == "0"


@pytest.mark.slow
def test_a_group_is_started_fails_is_killed_and_started_again(second: Node) -> None:
    for number in (1, 2):
        second.processes.start(1, number)
        (worker,) = second.workers(1)
        environment = worker.environ()
        assert [environment[name] for name in ("RANK", "WORLD_SIZE", GROUP, START)] == ["0", "1", "1", str(number)]
        worker.kill()
        failed = second.receive(WorkerExited)
        assert (failed.group, failed.number, failed.rank) == (1, number, 1)
        assert "SIGKILL" in failed.summary
        second.processes.kill(1)
        exited = second.receive(GroupExited)
        assert (exited.group, exited.number, exited.left_behind) == (1, number, ())
        assert processes.members(LAUNCH) == []
        assert second.processes.poll() == [], "once"


@pytest.mark.slow
def test_a_killed_worker_that_torchrun_has_reaped_is_said_to_be_killed(second: Node) -> None:
    """torchrun itself ends with 1; an agent that was held up sees no more than that."""
    second.processes.start(1, 1)
    (worker,) = second.workers(1)
    torchrun = psutil.Process(worker.ppid())
    worker.kill()
    wait_for(lambda: torchrun.status() == psutil.STATUS_ZOMBIE)
    exited = second.receive(WorkerExited)
    assert exited.was_killed and "SIGKILL" in exited.summary
    assert second.receive(GroupExited).exit_code == 1


@pytest.mark.slow
def test_a_request_to_stop_is_noted_and_ends_well(second: Node) -> None:
    second.processes.start(1, 1)
    wait_for(second.job.run.events(0).is_file)
    second.processes.stop()
    assert second.receive(GroupExited) == GroupExited(1, 1, 0)
    assert was_stop_noted(second.job.run, 1)


@pytest.mark.slow
def test_orphans_are_reported_once_and_asked_to_save_without_noting_a_stop(only) -> None:
    node = only("endless")
    node.processes.start(0, 1)
    wait_for(lambda: all(node.job.run.events(rank).is_file() for rank in (0, 1)))
    psutil.Process(node.workers(2)[0].ppid()).kill()
    node.receive(WorkerExited)
    node.receive(WorkersOrphaned)
    assert node.processes.poll() == []
    node.processes.stop(0)
    assert node.receive(GroupExited) == GroupExited(0, 1, -9)
    assert not was_stop_noted(node.job.run, 1)
    assert node.job.run.checkpoint_steps()


@pytest.mark.slow
def test_a_run_of_one_group_has_the_time_to_report_a_failed_worker(only) -> None:
    """Nothing is killed, or reported, before its torchrun has listed how the workers ended."""
    node = only("endless")
    node.processes.start(0, 1)
    wait_for(lambda: all(node.job.run.events(rank).is_file() for rank in (0, 1)))
    node.workers(2)[1].kill()
    assert node.receive(WorkerExited).rank == 1
    assert node.receive(GroupExited).exit_code == 1


@pytest.mark.slow
def test_what_hangs_in_the_kernel_is_left_behind(second: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the group follows a signal here."""
    monkeypatch.setattr(local.processes, "KILL_TIMEOUT_S", 0.3)
    second.processes.start(1, 1)
    (worker,) = second.workers(1)
    family = second.processes._starts[1].family
    monkeypatch.setattr(family, "kill_once", family.members)
    second.processes.kill(1)
    began = time.monotonic()
    exited = second.receive(GroupExited)
    assert time.monotonic() - began >= 0.2
    assert worker.pid in exited.left_behind
    assert exited.exit_code is None
    monkeypatch.undo()
