from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest

from trainspec_cli.core.environment_names import GROUP, LAUNCH_ID
from trainspec_cli.run.backend import processes

STARTING, TOLD, OTHER = (f"{name}-{os.getpid()}" for name in ("starting", "told", "other"))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Start a process with these variables; every process is killed at the end."""
    with ExitStack() as ends:

        def started(**variables: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(["sleep", "60"], env={**os.environ, **variables})
            ends.callback(process.wait)
            ends.callback(process.kill)
            return process

        yield started


@pytest.fixture
def crowded_core() -> Iterator[None]:
    """This process and what it starts share one core with two that never wait."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in busy:
        process.kill()
        process.wait()
    os.sched_setaffinity(0, cores)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux alone can be asked for one core")
@pytest.mark.usefixtures("crowded_core")
def test_a_process_is_found_from_its_first_instant(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux lets go of the parent when the child has its new program, before its environment can be read."""
    for _ in range(20):
        pid = start(**{LAUNCH_ID: STARTING}).pid
        # a host of few processes, where looking at them takes no time
        monkeypatch.setattr(psutil, "process_iter", lambda pid=pid: [psutil.Process(pid)])
        assert [process.pid for process in processes.members(STARTING)] == [pid]


def test_a_parent_that_ends_meanwhile_hides_no_process(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard looks for workers at the moment at which its supervisor, which was killed, is still ending."""
    parents, asked = psutil.Process.parents, []

    def look_up(process: psutil.Process) -> list[psutil.Process]:
        asked.append(process)
        if len(asked) == 1:
            raise psutil.NoSuchProcess(os.getppid())
        return parents(process)

    monkeypatch.setattr(psutil.Process, "parents", look_up)
    pid = start(**{LAUNCH_ID: OTHER}).pid
    assert [process.pid for process in processes.members(OTHER)] == [pid] and len(asked) == 2


def test_workers_are_told_from_what_they_start(
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    agent = start(**{LAUNCH_ID: TOLD, GROUP: "0"})
    worker = start(**{LAUNCH_ID: TOLD, GROUP: "1", "RANK": "0"})
    other = start(**{LAUNCH_ID: OTHER, GROUP: "1", "RANK": "0"})
    assert {p.pid for p in processes.members(TOLD)} == {agent.pid, worker.pid}
    assert [p.pid for p in processes.workers(TOLD)] == [worker.pid]
    assert processes.kill(TOLD) == []
    assert agent.wait() == worker.wait() == -9
    assert other.poll() is None


@pytest.fixture
def bare(start: Callable[..., subprocess.Popen[bytes]]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes without any environment, as slurmstepd is, that have just been started."""
    made = [subprocess.Popen(["sleep", "60"], env={}) for _ in range(8)]
    yield made
    for process in made:
        process.kill()
        process.wait()


@pytest.mark.usefixtures("bare")
def test_processes_without_an_environment_are_waited_for_together_and_once(
    start: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = start(**{LAUNCH_ID: TOLD}).pid
    clock = SimpleNamespace(now=0.0, time=time.time)  # it advances by what is slept, whatever else the machine does
    clock.monotonic = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(processes, "time", clock)
    assert [process.pid for process in processes.members(TOLD)] == [pid]
    assert clock.now == pytest.approx(processes.EXEC_TIMEOUT_S, rel=0.01), "once for all eight"
    assert [process.pid for process in processes.members(TOLD)] == [pid]
    assert clock.now == pytest.approx(processes.EXEC_TIMEOUT_S, rel=0.01)
