"""How a run stands, in a word: done, stopped or failed (its result says so), or what follows from having none."""

from __future__ import annotations

from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import read_object
from trainspec_cli.rundir.paths import RunDir

QUEUED, RUNNING, MADE, KILLED, DAMAGED = "queued", "running", "made", "killed", "damaged"
"""Slurm will start it, once more or for the first time; it is alive; it is written down for Slurm and was never
started; it ended, and nobody could write a result; its files cannot be read."""


def status_of(run: RunDir, *, running: bool, queued: bool) -> str:
    if queued:
        return QUEUED
    if running:
        return RUNNING
    if run.result_json.is_file():
        return str(read_object(run.result_json, {"status": str})["status"])
    never_started = run.job_sbatch.is_file() and not generations.newest(run)
    return MADE if never_started else KILLED
