"""Whole runs: the command line, torchrun, workers on gloo."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from lab.waiting import PATIENCE_S, wait_for

from trainspec_cli.run.backend.processes import rank_of, workers_among
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS = 80
WHOLE = ("recipe=tiny", f"train.max_steps={STEPS}")

Trainspec = Callable[..., subprocess.CompletedProcess[str]]


def slow_from(step: int) -> str:
    """Two seconds, so that a test which is held up still finds its run going."""
    return f"fault=slow(step={step},seconds=0.1,steps=20)"


@pytest.fixture(scope="session")
def environment(measured_cache: Path) -> dict[str, str]:
    return os.environ | {"TRAINSPEC_CACHE": str(measured_cache)}


@pytest.fixture
def trainspec(tmp_path: Path, environment: dict[str, str]) -> Trainspec:
    """Runs `trainspec ARGUMENTS` in an empty folder and waits for it."""

    return partial(_run, tmp_path, environment)


@pytest.fixture
def trainspec_in(tmp_path: Path, environment: dict[str, str]) -> Trainspec:
    """trainspec_in(procs, *ARGUMENTS): `trainspec` within a control group, whose file of processes is `procs`."""

    def run(procs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        join = ["bash", "-c", 'echo $$ > "$0"; exec "$@"', str(procs)]
        command = [*join, sys.executable, "-m", "trainspec_cli", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> RunDir:
    """A run of WHOLE that nobody touched: tests copy it, and hold runs against it that were disturbed."""
    place = tmp_path_factory.mktemp("whole")
    ended = _run(place, environment, "launch", *WHOLE, "checkpoint.interval_steps=10", "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return RunDir(place / "run")


@pytest.fixture(scope="session")
def whole_of(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Callable[..., RunDir]:
    """whole_of(*RECIPE): a run of it that nobody touches; tests that ask for the same one share it."""

    @cache
    def launch(*recipe: str) -> RunDir:
        place = tmp_path_factory.mktemp("whole")
        ended = _run(place, environment, "launch", *recipe, "run.dir=run")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return RunDir(place / "run")

    return launch


@pytest.fixture(scope="session")
def undisturbed(whole: RunDir) -> str:
    """The digest of its weights."""
    return str(json.loads(whole.result_json.read_text())["weights_sha256"])


def _run(place: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `trainspec ARGUMENTS` for as long as pytest's own limit lets it: a shared machine may be slow."""
    command = [sys.executable, "-m", "trainspec_cli", *arguments]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True)


@pytest.fixture
def start_trainspec(tmp_path: Path, environment: dict[str, str]):
    """Starts `trainspec ARGUMENTS` and leaves it running; whatever is left of it is killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "trainspec_cli", *arguments],
                cwd=tmp_path,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def read_result(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda run: json.loads((tmp_path / run / "result.json").read_text())


def _wait_for_step(run_dir: RunDir, step: int, process: subprocess.Popen[str]) -> None:
    def reached() -> bool:
        return any(e["type"] == "step" and e["step"] >= step for e in read_events(run_dir.events(0)))

    wait_for(reached, process, every_s=0.005)


def _workers_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    family = psutil.Process(process.pid).children(recursive=True)
    return sorted(workers_among(family), key=lambda worker: rank_of(worker) or 0)


def _kill_everything(process: subprocess.Popen[str]) -> None:
    own = psutil.Process(process.pid)
    family = [own, *own.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    psutil.wait_procs(family, timeout=PATIENCE_S)
    process.wait()


@pytest.fixture
def wait_for_step():
    return _wait_for_step


@pytest.fixture
def workers_of():
    return _workers_of


@pytest.fixture
def kill_everything():
    return _kill_everything
