"""How soon help is there, as a ratio to Python's own start, so that it holds on any machine."""

from __future__ import annotations

import subprocess
import sys
import time

MOST_TIMES_A_BARE_PYTHON = 9
REPEATS = 7


def fastest_s(commands: list[list[str]]) -> list[float]:
    """Of each command, in turns; the fastest is the one that nothing disturbed."""
    times_s: list[list[float]] = [[] for _ in commands]
    for _ in range(REPEATS):
        for command, times in zip(commands, times_s, strict=True):
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times.append(time.perf_counter() - start)
    return [min(times) for times in times_s]


def test_help_comes_at_once() -> None:
    bare_s, help_s = fastest_s([[sys.executable, "-c", "pass"], [sys.executable, "-m", "trainspec_cli", "--help"]])
    assert help_s / bare_s <= MOST_TIMES_A_BARE_PYTHON
