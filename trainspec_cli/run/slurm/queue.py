"""A run's job in Slurm's queue: its id, whether it is still pending, and whether and why it is requeued."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.core.errors import EXIT_DONE, Interrupted, MachineError, Stopped, WorkerError
from trainspec_cli.core.reading.files import read_field
from trainspec_cli.run.folder.files import read_versioned, write_versioned
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import NodeErrorRecord, WorkerErrorRecord, read_error
from trainspec_cli.run.slurm import commands as slurm

HUNG = "hang"
"""The error code of a worker whose step hung."""


def note_job(run: RunDir, job_id: str) -> None:
    """Record the job of a run. `job_id` has the format of squeue: `12`, or `12_3` for a task of an array."""
    write_versioned(run.slurm_json, {"job_id": job_id})


def job_of(run: RunDir) -> str | None:
    """Return the last job of a run; None if it never had one."""
    if not run.slurm_json.is_file():
        return None
    return read_field(run.slurm_json, read_versioned(run.slurm_json), "job_id", str)


def own_job() -> str:
    """Return the id of this process's job, in the format of `note_job`. For some commands, the plain number of a task
    would mean the entire array."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


class Queue:
    """The pending jobs of this user. Slurm is queried once for all runs, and not at all if none of them was
    submitted."""

    def __init__(self) -> None:
        self._pending: frozenset[str] | None = None

    def holds(self, run: RunDir) -> bool:
        job_id = job_of(run)
        if job_id is None:
            return False
        if self._pending is None:
            self._pending = slurm.pending()
        return job_id in self._pending


@dataclass(frozen=True)
class Requeue:
    reason: str
    """The reason for requeueing, for example `the time limit is near`."""
    avoid: Sequence[str] = ()
    """Nodes that were lost, and that the requeued job should avoid."""


def is_over(job: Mapping[str, str], restarts: int) -> bool:
    """Return True if Slurm has restarted the job in the meantime (its node was disconnected and has come back). If so,
    the start that followed `restarts` restarts must do nothing more. `job`: Slurm's fields for the job."""
    return int(job.get("Restarts", restarts)) > restarts


def is_preempted(job: Mapping[str, str]) -> bool:
    """Return True if the job was preempted. Its signals alone do not show this, because scancel also sends SIGTERM."""
    return job.get("PreemptTime", "None") not in ("None", "Unknown")


def decide(
    run: RunDir, exit_code: int, *, warned: bool, preempted: bool, num_nodes: int, after_hang: bool = True
) -> Requeue | None:
    """Requeue for causes that a restart fixes: a time limit, a preemption, a lost node, or a hang (if `after_hang`),
    but not for an error."""
    # If the signal killed workers that had not started, that is not a failure.
    if preempted and exit_code != EXIT_DONE:
        return Requeue("it was preempted")
    if warned and exit_code in (Stopped.exit_code, Interrupted.exit_code):
        return Requeue("it was warned of its time limit")
    if exit_code not in (WorkerError.exit_code, MachineError.exit_code):
        return None
    nodes = (read_error(path, NodeErrorRecord) for path in sorted(run.errors_folder.glob("node*.json")))
    # If a node never joins, the run exits with MachineError's code, as for many failures that a restart would not fix.
    lost = [node for node in nodes if node.lost and (exit_code == WorkerError.exit_code or not node.host)]
    if lost:
        names = ", ".join(f"node {node.node} ({node.host or 'never joined'})" for node in lost)
        all_at_once = len(lost) == num_nodes  # no single node is at fault, so none is avoided
        return Requeue(f"{names} was lost", [] if all_at_once else [node.host for node in lost if node.host])
    hung = (read_error(path, WorkerErrorRecord).code == HUNG for path in run.errors_folder.glob("rank*.json"))
    if after_hang and any(hung):
        return Requeue("a step hung")
    return None
