"""Remove runs, or checkpoints that are no longer needed, but never those of a run that is running or queued in
Slurm."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.reporter.runs import ALIVE, DAMAGED, RunLine, list_runs
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.accounting import best_checkpoint
from trainspec_cli.run.folder.memory import find_copies, remove_folder
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_section
from trainspec_cli.run.job.folder import RUNS, claim, is_running
from trainspec_cli.run.slurm.queue import Queue
from trainspec_cli.session.runs.find import find_own_run, runs_here, status_of_run

BLOCK_BYTES = 512
"""Unit of `st_blocks`, in bytes."""


@dataclass(frozen=True)
class Removal:
    """Folders of one run that are to be removed."""

    run: RunDir
    status: str
    folders: tuple[Path, ...]
    """The run's folder, or some of its checkpoints."""
    bytes: int
    generation: int = 0
    """The run's newest start at the time of the decision. If the run has been started again since then, it is not
    removed."""
    begun_with_it: tuple[str, ...] = ()
    """Listed runs that were initialised from this run's weights."""

    @property
    def is_whole(self) -> bool:
        return self.run.root.resolve() in self.folders


def plan_removal(names: Sequence[str]) -> list[Removal]:
    """Return the removals for these runs. Raises RecipeError for a run that is running or queued, or whose folder
    contains another run or the current folder, and the same errors as `find_own_run`."""
    found = {run.root.resolve(): run for run in map(find_own_run, names)}
    lines = runs_here()
    removals = []
    for run in found.values():
        if (status := status_of_run(run)) in ALIVE:
            hint = "stop it first: trainspec stop RUN; for a Slurm job: scancel JOB"
            raise RecipeError(Problem("still_running", f"the run in {run.root} is {status}", hint=hint))
        removals.append(_whole(run, status, lines))
    return removals


def plan_pruning(statuses: Sequence[str], older_than_s: float, *, checkpoints: bool) -> Iterator[Removal]:
    """Yield the removals for pruning the runs below ./runs that have one of these statuses and at least this age: the
    runs themselves or, with `checkpoints`, all of their checkpoints except the newest and the best."""
    lines = list_runs(RUNS, is_running, Queue().holds)
    for line in lines:
        if (
            line.status not in statuses
            or line.status in (*ALIVE, DAMAGED)
            or time.time() - line.created_at < older_than_s
        ):
            continue
        run = find_own_run(line.path)
        removal = _checkpoints(run, line.status) if checkpoints else _whole(run, line.status, lines)
        if removal.folders:
            yield removal


def remove(removal: Removal) -> None:
    """Remove the folders while holding a claim on the run. Raises RecipeError if the run was started in the
    meantime."""
    run = removal.run
    with claim(run, "remove"):
        # The user confirmed removing the run as it was then, without any later steps.
        if generations.newest(run) != removal.generation:
            message = f"the run in {run.root} was started meanwhile"
            hint = "check it again: trainspec runs"
            raise RecipeError(Problem("still_running", message, hint=hint))
        copies = find_copies(run) if removal.is_whole else None
        for folder in removal.folders:
            shutil.rmtree(folder)
        if copies:
            remove_folder(copies)


def _whole(run: RunDir, status: str, lines: Sequence[RunLine]) -> Removal:
    root = run.root.resolve()
    copies = find_copies(run)
    if root in (Path.cwd(), *Path.cwd().parents):
        message = f"the current folder is in the run {run.root}"
        hint = "run the command from another folder: cd .."
        raise RecipeError(Problem("in_use", message, hint=hint))
    if inner := next((path.parent for path in root.rglob(run.run_json.name) if path.parent != root), None):
        message = f"the run {run.root} contains the folder of another run"
        hint = f"move it away first: {inner}"
        raise RecipeError(Problem("in_use", message, hint=hint))
    taken = _bytes_of(root) + (_bytes_of(copies) if copies else 0)
    begun_with_it = []
    for line in lines:
        begins_with = None if line.damage else read_section(RunDir(line.path), "init").get("from")
        if isinstance(begins_with, str) and Path(begins_with).expanduser().resolve() == root:
            begun_with_it.append(line.path)
    return Removal(run, status, (root,), taken, generations.newest(run), tuple(begun_with_it))


def _checkpoints(run: RunDir, status: str) -> Removal:
    kept = {run.newest_step, best_checkpoint(run)}
    folders = tuple(run.checkpoint(step) for step in run.checkpoint_steps() if step not in kept)
    return Removal(run, status, folders, sum(map(_bytes_of, folders)), generations.newest(run))


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_blocks * BLOCK_BYTES for path in folder.rglob("*") if path.is_file())
