"""A standby is used once, by the next start with the same environment, and never outlives its owner."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lab.waiting import wait_for

from trainspec_cli.core.environment_names import GENERATION, GROUP, LAUNCH_ID
from trainspec_cli.run.backend import processes, standby
from trainspec_cli.run.backend.standby import end_standby, keep_standby, take_standby
from trainspec_cli.run.job.job import TORCHRUN, own_modules, torchrun_command

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone"),
    pytest.mark.slow,
]
LAUNCH = f"standby-{os.getpid()}"
BEFORE = {LAUNCH_ID: "before", GENERATION: "1", "OMP_NUM_THREADS": "1", **own_modules()}
PROGRAM = """
import os, sys, time
print(os.environ["TRAINSPEC_LAUNCH_ID"], os.environ["TRAINSPEC_GENERATION"], sys.argv[1], flush=True)
time.sleep(600)
"""


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> Iterator[psutil.Process]:
    """A standby that has imported the engine."""
    monkeypatch.setattr(standby, "_due_s", 0.0)
    keep_standby(BEFORE)
    (waiting,) = standby._waiting
    process = psutil.Process(waiting.process.pid)
    wait_for(lambda: process.name() == "standby")
    yield process
    end_standby()
    for process in processes.kill(LAUNCH):
        process.kill()


def test_a_start_is_a_standbys(ready: psutil.Process, tmp_path: Path) -> None:
    """It has imported the engine before, runs in the start's environment, writes its log, and is found by its marks,
    as are the workers that it starts."""
    assert ready.name() == "standby"
    imported = {Path(one.path).name for one in ready.memory_maps()}
    assert "libtorch_cpu.so" in imported
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    environment = BEFORE | {LAUNCH_ID: LAUNCH, GENERATION: "2", GROUP: "7"}
    log = tmp_path / "torchrun.log"
    taken = take_standby(torchrun_command(1, tmp_path, (str(script), "argument")), environment, log)
    assert taken is not None and taken.pid == ready.pid

    def said() -> str:
        return "".join(output.read_text() for output in tmp_path.glob("workers_*/attempt_0/0/stdout.log"))

    wait_for(lambda: said().endswith("\n"))
    assert said() == f"{LAUNCH} 2 argument\n"
    members = processes.members(LAUNCH)
    (worker,) = ready.children()
    assert {ready.pid, worker.pid} <= {one.pid for one in members}
    assert {processes.environ(one)[GROUP] for one in (ready, worker)} == {"7"}
    worker.kill()
    assert taken.wait() == 1
    assert "program.py FAILED" in log.read_text()


def test_another_start_is_not_a_standbys(ready: psutil.Process, tmp_path: Path) -> None:
    """The number of threads was read at import."""
    command = torchrun_command(1, tmp_path, ("program.py",))
    assert take_standby(("program",), BEFORE, tmp_path / "log") is None
    assert standby._waiting, "only torchrun takes it"
    assert take_standby(command, BEFORE | {"OMP_NUM_THREADS": "2"}, tmp_path / "log") is None
    assert not ready.is_running()
    keep_standby(BEFORE)
    assert not standby._waiting, "the start's workers come first"


def test_a_standby_ends_with_its_owner(tmp_path: Path) -> None:
    text = """
import sys
from trainspec_cli.run.backend import standby
standby.keep_standby({})
print(standby._waiting[0].process.pid, flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    waiting = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait()
    wait_for(lambda: not waiting.is_running() or waiting.status() == psutil.STATUS_ZOMBIE)


def test_a_standby_that_was_killed_is_not_taken(ready: psutil.Process, tmp_path: Path) -> None:
    ready.kill()
    ready.wait()
    assert take_standby((*TORCHRUN, "--help"), BEFORE, tmp_path / "log") is None
