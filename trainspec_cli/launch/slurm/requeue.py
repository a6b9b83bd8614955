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
    reports = [read_json(path) for path in sorted(run.errors_folder.glob("*.json"))]
    lost = [report for report in reports if report.get("lost")]
    if lost:
        names = ", ".join(f"node {report['node']} ({report['host'] or 'never joined'})" for report in lost)
        all_at_once = len(lost) == read_json(run.plan_json)["num_nodes"]  # then no single node is at fault
        avoid = [] if all_at_once else [report["host"] for report in lost if report["host"]]
        return Requeue(f"{names} was lost", avoid)
    if any(report.get("code") == HUNG for report in reports):
        return Requeue("a step hung")
    return None
