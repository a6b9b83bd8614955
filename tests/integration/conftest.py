"""Whole runs: the command line, torchrun, workers on gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Trainspec = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache of prepared text for all runs of the session."""
    return os.environ | {"TRAINSPEC_CACHE": str(tmp_path_factory.mktemp("cache"))}


@pytest.fixture
def trainspec(tmp_path: Path, environment: dict[str, str]) -> Trainspec:
    """Runs `trainspec ARGUMENTS` in an empty folder and waits for it."""

    def run(*arguments: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "trainspec_cli", *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    return run


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
