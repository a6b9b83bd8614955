"""Record the job of a run, and find out whether it is still pending."""

from __future__ import annotations

import os

from trainspec_cli.launch.slurm import commands as slurm
from trainspec_cli.rundir.files import read_object, write_json
from trainspec_cli.rundir.paths import RunDir


def note_job(run: RunDir, job_id: str) -> None:
    """Record the job of a run; `job_id` as squeue shows it: `12`, or `12_3` for a task of an array."""
    write_json(run.slurm_json, {"job_id": job_id})


def own_job() -> str:
    """Return the id of the job that this process is in, as `note_job` wants it.

    A task's plain number would name the whole array in some commands.
    """
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


class Queue:
    """Asks Slurm once for all runs, and not at all if none of them was submitted."""

    def __init__(self) -> None:
        self._pending: frozenset[str] | None = None

    def holds(self, run: RunDir) -> bool:
        if not run.slurm_json.is_file():
            return False
        if self._pending is None:
            self._pending = slurm.pending()
        return read_object(run.slurm_json, {"job_id": str})["job_id"] in self._pending
