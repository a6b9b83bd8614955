"""Workers in separate processes and their hub, over a Unix socket and over a port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.waiting import PATIENCE_S

from trainspec_cli.core.environment_names import SECRET_FILE, SUPERVISOR
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.verdict import LookOrder
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.channel.messages import ExpectGroups, ShortageNote, SpeedsReport, WorkerExited, WorkerHello
from trainspec_cli.run.channel.wire import Wire, call_hub
from trainspec_cli.run.channel.worker import SupervisorConnection
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.run.job.machine import listen

WORKER = Path(__file__).with_name("connected_worker.py")
ORDER = LookOrder(number=1, looker=1, cause="slow_device", rank=1)
SPEEDS = SpeedsReport(
    step=3, step_s=1.0, layout=Layout(), micro_batches=1, samples=(4,), fixed_s=(0.0,), per_sample_s=(0.25,)
)


class Lab:
    def __init__(self, folder: Path, *, on_port: bool):
        self.folder = folder
        self.secret = create_secret(folder / "secret")
        self.on_port = on_port
        self.processes: list[subprocess.Popen[bytes]] = []
        self.open()

    def open(self) -> None:
        if self.on_port:
            listener = listen("127.0.0.1")
            self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        else:
            (self.folder / "hub").unlink(missing_ok=True)
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self.folder / "hub"))
            listener.listen(64)
            self.address = str(self.folder / "hub")
        self.hub = Hub(0, self.secret, listener, timeout_s=PATIENCE_S, join_timeout_s=PATIENCE_S)

    def start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = {**os.environ, SUPERVISOR: self.address, SECRET_FILE: str(self.folder / "secret")}
        command = [sys.executable, str(WORKER), str(rank), str(self.folder)]
        self.processes.append(subprocess.Popen(command, env=environment))
        return self.processes[-1]

    def wait_for(self, holds: Callable[[], object]) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < end_s
            self.hub.poll()
            time.sleep(0.01)

    def was_told(self, rank: int, message: object) -> bool:
        return (self.folder / f"{rank}-{message}").exists()


@pytest.fixture
def open_lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    made: list[Lab] = []

    def make(**about: bool) -> Lab:
        made.append(Lab(tmp_path, **about))
        return made[-1]

    yield make
    for lab in made:
        lab.hub.close()
        for process in lab.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize("on_port", [False, True])
def test_messages_reach_the_ranks_they_are_for_and_workers_that_come_later(
    open_lab: Callable[..., Lab], on_port: bool
) -> None:
    lab = open_lab(on_port=on_port)
    lab.hub.send_to_workers(ExpectGroups(2))
    for rank in (0, 1):
        lab.start(rank)
    lab.wait_for(lambda: all(lab.was_told(rank, ExpectGroups(2)) for rank in (0, 1)))
    lab.hub.send_to_workers(ORDER, rank=1)
    lab.wait_for(lambda: lab.was_told(1, ORDER))
    (lab.folder / "short0").touch()
    note = ShortageNote(0, step=7)
    lab.wait_for(lambda: lab.was_told(1, note))
    lab.start(2)
    lab.wait_for(lambda: lab.was_told(2, note))
    assert not lab.was_told(0, ORDER)


def test_a_worker_that_was_killed_is_forgotten_and_its_next_start_takes_its_place(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(on_port=False)
    first = lab.start(0)
    lab.wait_for(lambda: 0 in lab.hub._workers)
    first.kill()
    lab.wait_for(lambda: not lab.hub._workers)
    lab.hub.send_to_workers(ORDER, rank=0)
    lab.start(0)
    lab.wait_for(lambda: 0 in lab.hub._workers)
    lab.hub.send_to_workers(ExpectGroups(1))
    lab.wait_for(lambda: lab.was_told(0, ExpectGroups(1)))
    assert not lab.was_told(0, ORDER), "an order to a rank that is not there is lost"


def test_a_worker_whose_connection_is_lost_calls_again_and_sends_what_it_could_not(
    open_lab: Callable[..., Lab],
) -> None:
    lab = open_lab(on_port=False)
    worker = SupervisorConnection(lab.address, lab.secret, rank=0)
    lab.wait_for(lambda: 0 in lab.hub._workers)
    lab.hub.close()
    while not (worker._wire and worker._wire.closed):
        time.sleep(0.01)
    worker.send(SPEEDS)
    lab.open()
    found: list[SpeedsReport] = []
    lab.wait_for(lambda: found or (found.append(speeds) if (speeds := lab.hub.take_speeds()) else None))
    assert found == [SPEEDS]
    worker.close()


def test_a_worker_that_says_what_only_an_agent_may_say_is_cut_off(open_lab: Callable[..., Lab]) -> None:
    lab = open_lab(on_port=False)
    ends: list[Wire] = []
    worker = SupervisorConnection(lab.address, lab.secret, rank=1)
    lab.wait_for(lambda: 1 in lab.hub._workers)
    caller = threading.Thread(target=lambda: ends.append(call_hub(lab.address, lab.secret)))
    caller.start()
    lab.wait_for(lambda: ends)
    ends[0].send(WorkerHello(0))
    lab.wait_for(lambda: 0 in lab.hub._workers)
    ends[0].send(WorkerExited(0, 1, 0, "it says so itself"))
    lab.wait_for(lambda: 0 not in lab.hub._workers)
    assert 1 in lab.hub._workers
    worker.close()


def test_without_a_supervisor_nothing_is_heard_and_nothing_kept() -> None:
    alone = SupervisorConnection()
    alone.send(SPEEDS)
    assert (alone.receive(ExpectGroups), alone._unsent) == ([], [])
