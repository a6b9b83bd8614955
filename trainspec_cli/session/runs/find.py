"""Find the run that a RUN argument refers to, and the state of runs, for `runs`, `report`, `resume` and `export`."""

from __future__ import annotations

import itertools
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trainspec_cli.core.errors import MachineError, Problem, RecipeError, did_you_mean
from trainspec_cli.core.node import check_tree
from trainspec_cli.recipe.compose.folders import show_path
from trainspec_cli.reporter.collect import Report, collect
from trainspec_cli.reporter.runs import RunLine, list_runs, status_of
from trainspec_cli.run.folder.known_runs import known_runs
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import RUNS, is_running
from trainspec_cli.run.slurm.queue import Queue

LAST = "last"


def find_own_run(name: str) -> RunDir:
    """Find a run that is about to be trusted or changed. Raises the same errors as `find_run`, and MachineError if
    other users can write to its folder, or if a link leads out of it."""
    run = find_run(name)
    check_tree(run.root)
    return run


def find_run(name: str) -> RunDir:
    """Find a run to read. Raises RecipeError if it does not exist, and MachineError if this user has no permission to
    read it."""
    if name == LAST:
        return RunDir(_newest(runs_here()))
    run = RunDir(name)
    with refusing_closed(name):
        holds_run = _is_there(run)
    if not holds_run:
        if name and (named := _named(name)):
            return named
        hint = "`trainspec runs` lists the runs in this folder with their names; `last` is the newest"
        lines = runs_here()
        near = did_you_mean(name, {LAST, *(line.path for line in lines), *(line.name for line in lines if line.name)})
        raise RecipeError(Problem("no_run", f"{name} contains no run", hint=f"{near} {hint}" if near else hint))
    return run


def check_name_free(name: str) -> None:
    """Raise RecipeError if a run in this folder already has this `run.name`, because commands need unique names."""
    lines = runs_here() if name else []
    if paths := [line.path for line in lines if line.name == name]:
        free = next(free_names(name, first=2))
        message = f"the run in {paths[0]} has the name {name}"
        hint = f"choose another, such as run.name={free}; or continue that run: trainspec resume {name}"
        raise RecipeError(Problem("name_taken", message, "run.name", hint))


def free_names(name: str, first: int = 1) -> Iterator[str]:
    """Yield those names among NAME-1, NAME-2, ... that no run in this folder uses."""
    taken = {line.name for line in runs_here()}
    return (other for number in itertools.count(first) if (other := f"{name}-{number}") not in taken)


def _named(name: str) -> RunDir | None:
    """Return the run with this `run.name`, preferably in this folder, otherwise anywhere. Raises RecipeError if several
    runs have it."""
    paths = [line.path for line in runs_here() if line.name == name]
    paths = paths or [known.path for known in known_runs() if known.name == name]
    if len(paths) > 1:
        raise RecipeError(
            Problem("ambiguous", f"{len(paths)} runs are named {name}", hint=f"specify {' or '.join(paths)}")
        )
    return RunDir(paths[0]) if paths else None


def runs_here() -> list[RunLine]:
    """Return the current folder's runs, newest first: those below ./runs, and other known runs below the folder or
    launched from it."""
    here = Path.cwd()
    inside = (here / RUNS).resolve()
    known = (
        Path(run.path) for run in known_runs() if run.launched_from == str(here) or Path(run.path).is_relative_to(here)
    )
    others = [RunDir(show_path(path, here)) for path in known if not path.is_relative_to(inside)]
    return list_runs(RUNS, is_running, Queue().holds, others)


def collect_run(name: str) -> Report:
    """Return the current report of a run. Raises the same errors as `find_run`."""
    run = find_run(name)
    with refusing_closed(name):
        return collect(run.root, running=is_running(run), queued=Queue().holds(run))


def status_of_run(run: RunDir) -> str:
    return status_of(run, running=is_running(run), queued=Queue().holds(run))


@contextmanager
def refusing_closed(name: str) -> Iterator[None]:
    """Convert a permission error for another user's run into a MachineError."""
    try:
        yield
    except PermissionError as error:
        hint = f"have its owner open it: chmod -R g+rX {shlex.quote(name)}"
        problem = Problem("closed_run", f"{error.filename} is not accessible to this user", hint=hint, environment=True)
        raise MachineError(problem) from error


def _newest(lines: Sequence[RunLine]) -> str:
    """Return the path of the newest readable run, and report newer damaged ones."""
    for line in lines:
        if not line.damage:
            return line.path
        print(f"{LAST} skips {line.path}, which is damaged: {line.damage}", file=sys.stderr)
    if lines:
        raise RecipeError(
            Problem("no_run", "every run in this folder is damaged", hint="`trainspec runs` shows the reason")
        )
    hint = "specify a run's folder"
    if known := known_runs():
        hint = f"{hint}; the newest elsewhere is {shlex.quote(known[0].path)}"
    raise RecipeError(Problem("no_run", "there are no runs below ./runs, and none was launched from here", hint=hint))


def _is_there(run: RunDir) -> bool:
    """Return whether the path exists; False for an invalid name."""
    try:
        return run.run_json.exists()
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False
