"""Hosts side by side: who is slowest, and who falls so far below the others that a run would wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from trainspec_cli.errors import MachineError, Problem

SPEEDS = {"matmul_flops": "matrix products", "memory_bytes_per_s": "memory"}
FAR_BELOW = 0.6
"""A host with less than this part of the others' median speed is refused: every step waits for the slowest."""
BELOW = 0.85
"""And with less than this it is warned of."""


@dataclass(frozen=True)
class Comparison:
    """One host by one figure."""

    host: str
    figure: str
    ratio: float
    """To the median of the others."""

    @property
    def words(self) -> str:
        return f"{self.host} is slowest at {SPEEDS[self.figure]}: {self.ratio:.0%} of what the others do"


def compare(reports: Sequence[dict[str, Any]]) -> list[Comparison]:
    """The slowest host by each figure, the worst first; empty for one host."""
    found = []
    for figure in SPEEDS:
        speeds = [(report["speed"][figure], report["host"]) for report in reports if figure in report["speed"]]
        if len(speeds) > 1:
            (slowest, host), *others = sorted(speeds)
            found.append(Comparison(host, figure, slowest / median(speed for speed, _ in others)))
    return sorted(found, key=lambda comparison: comparison.ratio)


def refuse_unfit(reports: Sequence[dict[str, Any]]) -> None:
    """Raises MachineError with every host that fails a check or falls far below the others."""
    failed = [(report["host"], check) for report in reports for check in report["checks"] if check["status"] == "fail"]
    problems = [_failed(host, check) for host, check in failed]
    problems += [_too_slow(comparison) for comparison in compare(reports) if comparison.ratio < FAR_BELOW]
    if problems:
        raise MachineError(problems)


def _failed(host: str, check: dict[str, Any]) -> Problem:
    message = f"{host} is not fit: {check['name']}: {check['found']}"
    hint = f"{check['advice']}; or start all the same with run.preflight=false"
    return Problem("unfit_host", message, hint=hint, environment=True)


def _too_slow(comparison: Comparison) -> Problem:
    hint = (
        f"see what else runs there (trainspec doctor), leave it out (cluster.slurm.exclude={comparison.host}), "
        "or start all the same with run.preflight=false"
    )
    message = f"{comparison.words}, and every step would wait for it"
    return Problem("slow_host", message, hint=hint, environment=True)
