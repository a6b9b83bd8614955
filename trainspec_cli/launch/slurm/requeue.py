"""The decision whether a job that ended goes back to the queue, and where it must not run again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.errors import EXIT_DONE, Interrupted, Stopped, WorkerError
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir

HUNG = "hang"
"""The code of a worker that ended a step which hung."""


@dataclass(frozen=True)
class Requeue:
    reason: str
    """`the time limit is near`"""
    avoid: Sequence[str] = ()
    """Hostnames of nodes that were lost."""


def is_over(job: Mapping[str, str], restarts: int) -> bool:
    """Return whether Slurm has begun the job anew (its node was cut off, and comes back): the start that had `restarts`
    before it then has no say in it. `job`: what Slurm knows of it."""
    return int(job.get("Restarts", restarts)) > restarts


def is_preempted(job: Mapping[str, str]) -> bool:
    """Return whether the job was told to end because of one that goes first: by its warning's signal, or by the SIGTERM
    that a scancel would be too."""
    return job.get("PreemptTime", "None") not in ("None", "Unknown")


def decide(run: RunDir, exit_code: int, *, warned: bool, preempted: bool) -> Requeue | None:
    """Requeue the job for what another start mends: a time limit, a preemption, a lost node, a hang; never for the
    run's own error."""
    if preempted and exit_code != EXIT_DONE:  # workers that had not begun yet die of the signal: that is no failure
        return Requeue("it was preempted")
    if warned and exit_code in (Stopped.exit_code, Interrupted.exit_code):
        return Requeue("it was warned of its time limit")
    if exit_code != WorkerError.exit_code:
        return None
    errors = [read_json(path) for path in sorted(run.errors_folder.glob("*.json"))]
    lost = [error for error in errors if error.get("lost")]
    if lost:
        names = ", ".join(f"node {error['node']} ({error['host'] or 'never came'})" for error in lost)
        all_at_once = len(lost) == read_json(run.plan_json)["num_nodes"]  # that is not the nodes' doing
        avoid = [] if all_at_once else [error["host"] for error in lost if error["host"]]
        return Requeue(f"{names} was lost", avoid)
    if any(error.get("code") == HUNG for error in errors):
        return Requeue("a step hung")
    return None
