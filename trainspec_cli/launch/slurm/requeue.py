"""Decide whether a job that ended is requeued, and which nodes it must avoid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.errors import EXIT_DONE, Interrupted, Stopped, WorkerError
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir

HUNG = "hang"
"""The error code of a worker whose step hung."""


@dataclass(frozen=True)
class Requeue:
    reason: str
    """`the time limit is near`"""
    avoid: Sequence[str] = ()
    """Nodes that were lost."""


def is_over(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if Slurm has restarted the job meanwhile (its node was cut off, and came back).

    The start that had `restarts` before it must then do nothing. `job` holds Slurm's fields of it.
    """
    return int(job.get("Restarts", restarts)) > restarts


def is_preempted(job: Mapping[str, str]) -> bool:
    """Return True if the job was preempted, by its warning's signal or by SIGTERM (which a scancel sends too)."""
    return job.get("PreemptTime", "None") not in ("None", "Unknown")


def decide(run: RunDir, exit_code: int, *, warned: bool, preempted: bool) -> Requeue | None:
    """Requeue for causes that a restart fixes: a time limit, a preemption, a lost node, a hang; not for an error."""
    if preempted and exit_code != EXIT_DONE:  # workers that had not begun yet die of the signal: that is no failure
        return Requeue("it was preempted")
    if warned and exit_code in (Stopped.exit_code, Interrupted.exit_code):
        return Requeue("it was warned of its time limit")
    if exit_code != WorkerError.exit_code:
        return None
    words = [read_json(path) for path in sorted(run.errors_folder.glob("*.json"))]
    lost = [word for word in words if word.get("lost")]
    if lost:
        names = ", ".join(f"node {word['node']} ({word['host'] or 'never came'})" for word in lost)
        all_at_once = len(lost) == read_json(run.plan_json)["num_nodes"]  # that is not the hosts' doing
        avoid = [] if all_at_once else [word["host"] for word in lost if word["host"]]
        return Requeue(f"{names} was lost", avoid)
    if any(word.get("code") == HUNG for word in words):
        return Requeue("a step hung")
    return None
