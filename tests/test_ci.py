"""`.ci/run` with programs that only print in the place of its tools: what its last lines say, and when it ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]
LEFT_OUT = "left out: 2 slow tests of 1 files: run/test_tools.py (2)"
TOOLS = {
    "python3": "exit 0",
    "pip": "exit 0",
    "mypy": "exit 0",
    "ruff": "exit 0",
    "trainspec": "echo trained",
    "pytest": 'echo "pytest $*"; echo "9 passed"',
    **dict.fromkeys(("g++", "ip", "munged", "nft", "slurmctld"), "exit 0"),
}


@pytest.fixture
def ci(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """ci(pytest=TEXT, limit_s=S): the exit code of `.ci/run` and the lines that it printed."""

    def run(limit_s: float = 1500, **tools: str) -> tuple[int, list[str]]:
        (tmp_path / "bin").mkdir()
        for name, text in (TOOLS | tools).items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        (tmp_path / ".ci").mkdir()
        shutil.copy(CHECKOUT / ".ci/run", tmp_path / ".ci")
        shutil.copy(CHECKOUT / "README.md", tmp_path)
        environment = os.environ | {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "TRAINSPEC_CI_LIMIT_S": str(limit_s),
        }
        ended = subprocess.run([tmp_path / ".ci/run"], capture_output=True, text=True, env=environment)
        return ended.returncode, ended.stdout.splitlines()

    return run


def test_all_parts_run_and_the_last_line_is_that_of_the_tests(ci: Callable[..., tuple[int, list[str]]]) -> None:
    code, lines = ci()
    assert code == 0
    parts = [line.split(":")[0] for line in lines if ": exit code 0 after" in line]
    assert sorted(parts) == ["extras", "install", "lint", "quickstart", "slow", "slurm", "tests"]
    assert lines[-1] == "9 passed"


def test_the_last_lines_name_parts_that_failed_and_slow_tests_that_were_left_out(
    ci: Callable[..., tuple[int, list[str]]],
) -> None:
    code, lines = ci(mypy="exit 1", pytest=f"case $* in *slow*tests/slurm) echo '{LEFT_OUT}';; esac; echo 5 passed")
    assert code == 1
    assert lines[-4:-1] == [
        "failed: lint",
        *(LEFT_OUT.replace("left out", f"left out of {part}") for part in ("slurm", "slow")),
    ]
    assert lines[-1] == "5 passed"


def test_a_part_that_does_not_end_is_cut_short_and_the_others_are_begun(
    ci: Callable[..., tuple[int, list[str]]],
) -> None:
    code, lines = ci(limit_s=1, pytest='case $* in "") exec sleep 600;; esac; echo 5 passed')
    assert code == 1
    begun = {line.split(":")[0] for line in lines if ": exit code" in line}
    assert begun == {"extras", "install", "lint", "quickstart", "slow", "slurm", "tests"}
    assert any(line.startswith("cut short at 1 s:") and "tests" in line for line in lines[-4:])
