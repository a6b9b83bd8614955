"""A command observed from outside: signs of work, the process that hangs, and the rank that the others wait for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lab.gpus.machines import play

from trainspec_cli.run.channel.messages import RankStands
from trainspec_cli.wings.own_script import watches
from trainspec_cli.wings.own_script.watches import Silence, SilenceWatch, in_library, locate, name_late, name_silent

ASLEEP = "import time; time.sleep(600)"
SPINS = "while True: pass"


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The clock, which the tests set."""
    now = [time.monotonic()]
    monkeypatch.setattr(watches.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def start() -> Iterator:
    started = []

    def start(text: str, **environment: str) -> psutil.Process:
        child = subprocess.Popen([sys.executable, "-I", "-S", "-c", text], env=os.environ | environment)
        started.append(child)
        return psutil.Process(child.pid)

    yield start
    for child in started:
        child.kill()
        child.wait()


def poll_for(watch: SilenceWatch, clock: list[float], seconds: float, *members: psutil.Process) -> Silence | None:
    """Poll the watch every second of a simulated time in which the members do nothing."""
    for _ in range(int(seconds)):
        clock[0] += 1.0
        if found := watch.poll(lambda: members):
            return found
    return None


def wait_until_asleep(process: psutil.Process) -> None:
    """Wait until the process has begun to sleep."""
    before = -1.0
    while (spent := sum(process.cpu_times()[:2])) != before or process.status() != psutil.STATUS_SLEEPING:
        before = spent
        time.sleep(0.1)


def test_a_sleeping_process_is_silent_and_has_not_worked(tmp_path: Path, clock, start) -> None:
    process = start(ASLEEP)
    wait_until_asleep(process)
    watch = SilenceWatch(20.0, tmp_path / "log")
    found = poll_for(watch, clock, 60, process)
    assert found is not None and found[0] >= 20.0
    assert name_silent(found[1]) == (list(found[1]), "sleeps")
    assert [(one.pid, one.rank, one.stopped) for one in found[1]] == [(process.pid, None, False)]
    assert ASLEEP in found[1][0].command
    assert watch.worked_s <= 1.0, "the first sample includes all earlier work"


def test_a_growing_log_is_a_sign_of_work(tmp_path: Path, clock, start) -> None:
    process, log = start(ASLEEP), tmp_path / "log"
    wait_until_asleep(process)
    watch = SilenceWatch(3.0, log)
    for line in range(8):
        log.write_text("x" * (line + 1))
        assert poll_for(watch, clock, 1, process) is None
    assert watch.worked_s == pytest.approx(8.0, abs=0.01)
    assert poll_for(watch, clock, 60, process) is not None


@pytest.mark.slow
def test_a_stopped_process_is_named_and_one_that_spins_for_it_does_not_work(tmp_path: Path, start) -> None:
    spins, stopped = start(SPINS), start(SPINS, RANK="3")
    watch = SilenceWatch(2.0, tmp_path / "log")
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2.5:
        assert watch.poll(lambda: (spins, stopped)) is None, "both compute"
        time.sleep(0.05)
    assert watch.worked_s > 1.0
    os.kill(stopped.pid, signal.SIGSTOP)
    while not (found := watch.poll(lambda: (spins, stopped))):
        assert time.monotonic() < began_s + 60
        time.sleep(0.05)
    assert [(one.pid, one.rank, one.stopped) for one in found[1]] == [(stopped.pid, 3, True)]
    assert name_silent(found[1])[1] == "is stopped"


def test_without_a_limit_nothing_hangs(tmp_path: Path, clock, start) -> None:
    process = start(ASLEEP)
    assert poll_for(SilenceWatch(None, tmp_path / "log"), clock, 50, process) is None


def test_a_node_without_processes_is_not_silent(tmp_path: Path, clock, start) -> None:
    """A node that waits for others has no processes yet."""
    process = start(ASLEEP)
    wait_until_asleep(process)
    watch = SilenceWatch(20.0, tmp_path / "log")
    assert poll_for(watch, clock, 60) is None
    assert poll_for(watch, clock, 12, process) is None
    assert poll_for(watch, clock, 30, process) is not None


# The rank that the others wait for, according to all stacks


@pytest.fixture
def library(tmp_path: Path):
    """Return a function that gives the path of a file in an installed package of some name."""

    def make(name: str) -> Path:
        (tmp_path / name / "_src").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        return tmp_path / name / "_src" / "waits.py"

    return make


def stack(*files: Path | str) -> str:
    return "\n".join(f'  File "{file}", line {line} in call{line}' for line, file in enumerate(files, 1))


def late(*stacks: str) -> tuple[list[int], str]:
    """Return the late ranks, with each rank on its own node."""
    return name_late(
        [
            RankStands(rank, f"node{rank}", 7, stack, locate(stack), in_library(stack), stopped=False, ended=False)
            for rank, stack in enumerate(stacks)
        ]
    )


def test_a_rank_in_its_own_code_is_late_if_the_others_wait_in_a_library(library) -> None:
    waits = stack("/usr/lib/python3.11/threading.py", library("tensorflow"), "train.py")
    assert late(waits, stack("train.py"), waits)[0] == [1]
    assert locate(waits).startswith("call2, ") and locate(waits).endswith(" train.py:3")


def test_a_folder_with_the_name_of_a_library_is_the_users(tmp_path, library) -> None:
    own = tmp_path / "lightning" / "train.py"
    assert late(stack(library("torch"), own), stack(own))[0] == [1]


def test_compiled_jax_waits_without_a_frame(library) -> None:
    ranks, why = late(stack("train.py"), stack(library("jax"), "other.py"))
    assert ranks == [0, 1]
    assert why.endswith(" other.py:2") and "rank 0 waits in call1, train.py:1; rank 1 waits in call1, " in why


# Usage


def test_gpus_that_do_not_answer_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches.os.path, "exists", lambda path: True)
    for name, uses in (("busy", {4194301}), ("lost", set()), ("mismatched_driver", set())):
        with monkeypatch.context() as patch:
            play(name, patch)
            assert set(watches.gpu_uses()) == uses
