"""How soon help is there, as a ratio to Python's own start, so that it holds on any machine."""

from __future__ import annotations

import resource
import subprocess
import sys

MOST_TIMES_A_BARE_PYTHON = 9
REPEATS = 7


def spent_by_children_s() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def fastest_s(commands: list[list[str]]) -> list[float]:
    """The processor time of each command, in turns; the fastest is the one that nothing disturbed."""
    times_s: list[list[float]] = [[] for _ in commands]
    for _ in range(REPEATS):
        for command, times in zip(commands, times_s, strict=True):
            start_s = spent_by_children_s()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times.append(spent_by_children_s() - start_s)
    return [min(times) for times in times_s]


def test_help_comes_at_once() -> None:
    bare_s, help_s = fastest_s([[sys.executable, "-c", "pass"], [sys.executable, "-m", "trainspec_cli", "--help"]])
    assert help_s / bare_s <= MOST_TIMES_A_BARE_PYTHON
