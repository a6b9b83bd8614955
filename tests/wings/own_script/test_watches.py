"""What is seen of a command from outside: that it works, which process stands still, and whom the ranks wait for."""

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
from trainspec_cli.wings.own_script.watches import Silence, SilenceWatch, in_library, name_late, name_silent, place_of

ASLEEP = "import time; time.sleep(600)"
SPINS = "while True: pass"


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The time in seconds, which the tests set."""
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


def looks(watch: SilenceWatch, clock: list[float], seconds: float, *members: psutil.Process) -> Silence | None:
    """Look at every second for so many; no member does anything in that time, which does not pass for it."""
    for _ in range(int(seconds)):
        clock[0] += 1.0
        if found := watch.look(lambda: members):
            return found
    return None


def settle(process: psutil.Process) -> None:
    """Wait until it has begun to sleep."""
    before = -1.0
    while (spent := sum(process.cpu_times()[:2])) != before or process.status() != psutil.STATUS_SLEEPING:
        before = spent
        time.sleep(0.1)


def test_what_sleeps_is_silent_and_has_not_worked(tmp_path: Path, clock, start) -> None:
    process = start(ASLEEP)
    settle(process)
    watch = SilenceWatch(20.0, tmp_path / "log")
    found = looks(watch, clock, 60, process)
    assert found is not None and found[0] >= 20.0
    assert name_silent(found[1]) == (list(found[1]), "sleeps")
    assert [(one.pid, one.rank, one.stopped) for one in found[1]] == [(process.pid, None, False)]
    assert ASLEEP in found[1][0].command
    assert watch.worked_s <= 1.0, "the first look sees all that it has done before"


def test_a_log_that_grows_is_work(tmp_path: Path, clock, start) -> None:
    process, log = start(ASLEEP), tmp_path / "log"
    settle(process)
    watch = SilenceWatch(3.0, log)
    for line in range(8):
        log.write_text("x" * (line + 1))
        assert looks(watch, clock, 1, process) is None
    assert watch.worked_s == pytest.approx(8.0, abs=0.01)
    assert looks(watch, clock, 60, process) is not None


@pytest.mark.slow
def test_a_stopped_process_is_named_and_what_spins_for_it_does_not_work(tmp_path: Path, start) -> None:
    spins, stopped = start(SPINS), start(SPINS, RANK="3")
    watch = SilenceWatch(2.0, tmp_path / "log")
    began_s = time.monotonic()
    while time.monotonic() < began_s + 2.5:
        assert watch.look(lambda: (spins, stopped)) is None, "both compute"
        time.sleep(0.05)
    assert watch.worked_s > 1.0
    os.kill(stopped.pid, signal.SIGSTOP)
    while not (found := watch.look(lambda: (spins, stopped))):
        assert time.monotonic() < began_s + 60
        time.sleep(0.05)
    assert [(one.pid, one.rank, one.stopped) for one in found[1]] == [(stopped.pid, 3, True)]
    assert name_silent(found[1])[1] == "is stopped"


def test_without_a_limit_nothing_is_a_hang(tmp_path: Path, clock, start) -> None:
    process = start(ASLEEP)
    assert looks(SilenceWatch(None, tmp_path / "log"), clock, 50, process) is None


def test_what_is_not_there_yet_is_not_silent(tmp_path: Path, clock, start) -> None:
    """A node that waits for others has nothing running."""
    process = start(ASLEEP)
    settle(process)
    watch = SilenceWatch(20.0, tmp_path / "log")
    assert looks(watch, clock, 60) is None
    assert looks(watch, clock, 12, process) is None
    assert looks(watch, clock, 30, process) is not None


# Which rank the others wait for, as the stacks of all show it


@pytest.fixture
def library(tmp_path: Path):
    """library(NAME): the path of a file of an installed package."""

    def make(name: str) -> Path:
        (tmp_path / name / "_src").mkdir(parents=True)
        (tmp_path / name / "__init__.py").touch()
        return tmp_path / name / "_src" / "waits.py"

    return make


def stack(*files: Path | str) -> str:
    return "\n".join(f'  File "{file}", line {line} in call{line}' for line, file in enumerate(files, 1))


def late(*stacks: str) -> tuple[list[int], str]:
    """Each rank is on a node of its own."""
    return name_late(
        [
            RankStands(rank, f"node{rank}", 7, stack, place_of(stack), in_library(stack), stopped=False, ended=False)
            for rank, stack in enumerate(stacks)
        ]
    )


def test_a_rank_in_its_own_code_is_late_where_the_others_wait_in_a_library(library) -> None:
    waits = stack("/usr/lib/python3.11/threading.py", library("tensorflow"), "train.py")
    assert late(waits, stack("train.py"), waits) == ([1], "it is in no collective")
    assert place_of(waits) == "call2, called at train.py:3"


def test_a_folder_with_a_librarys_name_is_the_users_own(tmp_path, library) -> None:
    own = tmp_path / "lightning" / "train.py"
    assert late(stack(library("torch"), own), stack(own)) == ([1], "it is in no collective")


def test_what_jax_has_compiled_waits_without_a_frame(library) -> None:
    ranks, why = late(stack("train.py"), stack(library("jax"), "other.py"))
    assert ranks == [0, 1]
    assert why.endswith("rank 0 waits in call1, train.py:1; rank 1 waits in call1, called at other.py:2")


# Use


def test_use_of_gpus_that_do_not_answer_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watches.os.path, "exists", lambda path: True)
    for name, uses in (("busy", {4194301}), ("lost", set()), ("mismatched_driver", set())):
        with monkeypatch.context() as patch:
            play(name, patch)
            assert set(watches.gpu_uses()) == uses
