"""A run whose terminal is closed, as a killed tmux session or a lost connection does: on a real pseudo-terminal."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import is_running

pytestmark = pytest.mark.slow

CLI = (sys.executable, "-m", "trainspec_cli")
ENDLESS = ("recipe=tiny", "data.max_bytes=200000", "train.max_steps=100000", "checkpoint.interval_steps=50000")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose runs are ended even if the test fails."""
    folder = tmp_path_factory.mktemp("place")
    yield folder
    for pid_json in folder.glob("*/pid.json"):
        if is_running(RunDir(pid_json.parent)):
            os.kill(read_json(pid_json)["pid"], signal.SIGKILL)


@pytest.fixture(scope="module")
def environment(place: Path) -> dict[str, str]:
    (place / "tmp").mkdir()
    paths = {"TRAINSPEC_CACHE": str(place / "cache"), "TMPDIR": str(place / "tmp")}
    return {**os.environ, **paths, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "TERM": "xterm-256color"}


@pytest.fixture(autouse=True)
def no_traceback(place: Path) -> Iterator[None]:
    yield
    assert list((place / "tmp").glob("trainspec-*.txt")) == []


def has_stepped(run: RunDir) -> bool:
    return run.events(0).is_file() and b'"step"' in run.events(0).read_bytes()


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, command: tuple[str, ...], place: Path, environment: dict[str, str], *, ignores_hangup: bool):
        self.pid, self._master = pty.fork()
        if not self.pid:
            os.chdir(place)
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignores_hangup else signal.SIG_DFL)
            os.execve(command[0], command, environment)
        os.set_blocking(self._master, False)

    def read(self) -> None:
        try:
            os.read(self._master, 65536)
        except BlockingIOError:
            return

    def close(self) -> None:
        os.close(self._master)


def launch_on_terminal(place: Path, environment: dict[str, str], run: RunDir, *, ignores_hangup: bool) -> int:
    """Close the terminal at some moment of the run's first second of steps; return the supervisor's id."""
    command = (*CLI, "launch", *ENDLESS, f"run.dir={run.root}")
    terminal = Terminal(command, place, environment, ignores_hangup=ignores_hangup)

    def begun() -> bool:
        terminal.read()
        return has_stepped(run)

    wait_for(begun)
    leave_at = time.monotonic() + random.random()
    while time.monotonic() < leave_at:
        terminal.read()
        time.sleep(0.01)
    terminal.close()
    return terminal.pid


def check_stopped(run: RunDir) -> None:
    result = read_json(run.result_json)
    assert (result["status"], result["exit_code"]) == ("stopped", 6)
    assert run.checkpoint_steps() == [result["steps"]]


def test_a_closed_terminal_stops_the_run_with_a_checkpoint(place: Path, environment: dict[str, str]) -> None:
    run = RunDir(place / "hangup")
    pid = launch_on_terminal(place, environment, run, ignores_hangup=False)
    os.kill(pid, signal.SIGHUP)  # as the shell does, after the kernel
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
    check_stopped(run)


def test_a_run_that_ignores_the_hangup_goes_on(place: Path, environment: dict[str, str]) -> None:
    run = RunDir(place / "disowned")
    pid = launch_on_terminal(place, environment, run, ignores_hangup=True)
    before = run.events(0).stat().st_size
    wait_for(lambda: run.events(0).stat().st_size > before + 5000)
    assert is_running(run)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 6
    check_stopped(run)
    assert "\nstep " in run.run_log.read_text()


def test_a_detached_run_says_how_it_is_stopped_and_goes_on_by_itself(place: Path, environment: dict[str, str]) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*CLI, *arguments], cwd=place, env=environment, capture_output=True, text=True)

    run = RunDir(place / "detached")
    begun = call("launch", *ENDLESS, "run.dir=detached", "--detach", "--json")
    about = json.loads(begun.stdout)
    assert (about["run"], about["log"]) == (str(run.root), str(run.run_log))
    assert os.getsid(about["pid"]) == about["pid"]
    wait_for(lambda: has_stepped(run))
    stopped = call("stop", "detached")
    assert (stopped.returncode, stopped.stdout.split(";")[0], is_running(run)) == (0, "stopped", False)
    check_stopped(run)
    assert "stopped with a checkpoint" in call("logs", "detached", "-f").stdout

    refused = call("resume", "detached", "model.num_layers=3", "--detach")
    assert (refused.returncode, "model.num_layers" in refused.stderr) == (2, True)
    steps = read_json(run.result_json)["steps"] + 2
    resumed = call("resume", "detached", f"train.max_steps={steps}", "--detach")
    assert "trainspec watch detached\n" in resumed.stdout
    wait_for(lambda: run.result_json.is_file() and read_json(run.result_json)["status"] == "done")
