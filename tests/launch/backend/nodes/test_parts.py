"""An agent's part of a replica group, on real torchrun."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trainspec_cli.launch.backend import processes
from trainspec_cli.launch.backend.nodes.parts import Parts
from trainspec_cli.launch.backend.nodes.wire import Wire
from trainspec_cli.launch.job.job import build_node_job
from trainspec_cli.launch.job.place import NodePlace

HERE = "127.0.0.1"
LAUNCH = f"token-{os.getpid()}-1"


class Ends:
    """Both ends of a wire, and the orders that are put into one."""

    def __init__(self, plan, machine, root: Path):
        agent, hub = socket.socketpair()
        self.orders: deque[list[str]] = deque()
        self._hub, self._heard = Wire(hub), []
        logs = root / "logs" / "node00001"
        standin = (str(Path(__file__).parents[1] / "standin_worker.py"), "endless")
        job = build_node_job(plan, root, machine, NodePlace(1, 2, HERE), {}, 1, LAUNCH, logs, standin)
        self.parts = Parts(Wire(agent), self.orders, plan, job, node=1, head=HERE)

    def order(self, line: str) -> None:
        self.orders.append(line.split())

    def heard(self, kind: str) -> list[str]:
        """The first word of its kind; empty until it has come."""
        self.parts.anything_left()
        self._heard += self._hub.hear()
        return next((words for words in self._heard if words[0] == kind), [])


@pytest.fixture
def ends(make_plan, machine, tmp_path: Path) -> Iterator[Ends]:
    plan = replace(make_plan(), num_nodes=2, devices_per_node=1, replica_groups=2)
    made = Ends(plan, machine, tmp_path / "run")
    yield made
    made.parts.end()
    assert processes.members(LAUNCH) == []


def test_a_part_is_begun_lost_dropped_and_begun_again(ends: Ends, eventually) -> None:
    for start in ("1", "2"):
        ends.order(f"begin 1 {start}")
        ends.parts.anything_left()
        eventually(lambda: len(processes.workers(LAUNCH)) == 1)
        (worker,) = processes.workers(LAUNCH)
        environment = worker.environ()
        names = ("RANK", "WORLD_SIZE", "TRAINSPEC_GROUP", "TRAINSPEC_START")
        assert [environment[name] for name in names] == ["0", "1", "1", start]
        worker.kill()
        eventually(lambda start=start: ends.heard("lost")[:4] == ["lost", "1", start, "1"])
        assert "SIGKILL" in " ".join(ends.heard("lost"))
        ends.order(f"drop 1 {start}")
        eventually(lambda start=start: ends.heard("dropped") == ["dropped", "1", start])
        assert processes.members(LAUNCH) == []
        ends._heard.clear()


def test_a_killed_worker_that_torchrun_has_reaped_is_said_to_be_killed(ends: Ends, eventually) -> None:
    """torchrun itself ends with 1; an agent that was held up sees no more than that."""
    ends.order("begin 1 1")
    ends.parts.anything_left()
    eventually(lambda: len(processes.workers(LAUNCH)) == 1)
    (worker,) = processes.workers(LAUNCH)
    torchrun = psutil.Process(worker.ppid())
    worker.kill()
    eventually(lambda: torchrun.status() == psutil.STATUS_ZOMBIE)
    eventually(lambda: ends.heard("lost"))
    assert "was killed by SIGKILL" in " ".join(ends.heard("lost"))


def test_what_ends_well_is_told(ends: Ends, eventually) -> None:
    ends.order("begin 1 1")
    ends.parts.anything_left()
    eventually(lambda: (ends.parts._job.run.events(0)).is_file())
    ends.parts.ask_to_stop()
    eventually(lambda: ends.heard("done") == ["done", "1", "1"])
