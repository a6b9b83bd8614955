"""The status of a run, and the runs below a folder in a line each, read from the end of their events alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.errors import TrainspecError
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.event_types import StepEvent
from trainspec_cli.rundir.events import TAIL_BYTES, read_log
from trainspec_cli.rundir.files import read_object
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_max_steps, read_run_record
from trainspec_cli.spec.json_text import finite_or_none

QUEUED, RUNNING, MADE, KILLED, DAMAGED = "queued", "running", "made", "killed", "damaged"
"""Slurm will start it, once more or for the first time; it is alive; it is written down for Slurm and was never
started; it ended without a result; its files cannot be read."""

Ask = Callable[[RunDir], bool]


def status_of(run: RunDir, *, running: bool, queued: bool) -> str:
    """Return the status that the result has (done, stopped or failed), or the one that follows from having none."""
    if queued:
        return QUEUED
    if running:
        return RUNNING
    if run.result_json.is_file():
        return str(read_object(run.result_json, {"status": str})["status"])
    never_started = run.job_sbatch.is_file() and not generations.newest(run)
    return MADE if never_started else KILLED


@dataclass(frozen=True)
class RunLine:
    path: str
    recipe: str
    status: str
    step: int
    max_steps: int | None
    loss: float | None
    created_at: float
    """Unix seconds; of a damaged run when its folder was last changed."""
    damage: str = ""
    """Why the run cannot be read; empty where it can."""


def list_runs(folder: Path, is_running: Ask, is_queued: Ask) -> list[RunLine]:
    """Newest first. A run that cannot be read is listed as damaged, and hides no other; runs of others that are closed
    to this user are left out."""
    lines = []
    for run in find_runs(folder):
        with suppress(PermissionError):
            lines.append(_describe_any(run, is_running, is_queued))
    return sorted(lines, key=lambda line: line.created_at, reverse=True)


def find_runs(folder: Path) -> Iterator[RunDir]:
    """Folders that hold a run.json; what lies inside a run is not looked through."""
    for root, subfolders, files in os.walk(folder):
        if "run.json" in files:
            subfolders.clear()
            yield RunDir(root)


def _describe_any(run: RunDir, is_running: Ask, is_queued: Ask) -> RunLine:
    try:
        return _describe(run, is_running, is_queued)
    except PermissionError:
        raise
    except (TrainspecError, OSError) as error:
        return RunLine(str(run.root), "-", DAMAGED, 0, None, None, _changed_at(run), str(error))


def _changed_at(run: RunDir) -> float:
    try:
        return run.root.stat().st_mtime
    except OSError:
        return 0.0


def _describe(run: RunDir, is_running: Ask, is_queued: Ask) -> RunLine:
    record = read_run_record(run)
    step = last_step(run)
    return RunLine(
        path=str(run.root),
        recipe=record.recipe,
        status=status_of(run, running=is_running(run), queued=is_queued(run)),
        step=step.step if step else 0,
        max_steps=read_max_steps(run),
        loss=finite_or_none(step.loss) if step else None,
        created_at=record.created_at,
    )


def last_step(run: RunDir) -> StepEvent | None:
    """Return the newest step event of rank 0; None before there is one."""
    steps = [event for event in read_log(run.events(0), TAIL_BYTES) if isinstance(event, StepEvent)]
    return steps[-1] if steps else None
