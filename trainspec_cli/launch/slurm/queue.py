"""Which job a run was given to, and whether Slurm has yet to start it."""

from __future__ import annotations

import os

from trainspec_cli.launch.slurm import commands as slurm
from trainspec_cli.rundir.files import read_object, write_json
from trainspec_cli.rundir.paths import RunDir


def note_job(run: RunDir, job_id: str) -> None:
    """`job_id` as squeue shows it: `12`, or `12_3` for a task of an array."""
    write_json(run.slurm_json, {"job_id": job_id})


def own_job() -> str:
    """Inside a job: its number, as `note_job` wants it; what is done to a task's plain number may be done to the whole
    array."""
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{task}" if task else os.environ["SLURM_JOB_ID"]


class Queue:
    """Asks Slurm once for all runs, and not at all where none of them was given to it."""

    def __init__(self) -> None:
        self._pending: frozenset[str] | None = None

    def holds(self, run: RunDir) -> bool:
        if not run.slurm_json.is_file():
            return False
        if self._pending is None:
            self._pending = slurm.pending()
        return read_object(run.slurm_json, {"job_id": str})["job_id"] in self._pending
