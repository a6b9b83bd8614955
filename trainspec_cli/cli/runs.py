"""`trainspec runs`: the runs below ./runs, newest first; or what runs have left in this host's memory."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.errors import MachineError, Problem, RecipeError
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.units import format_duration

if TYPE_CHECKING:
    from trainspec_cli.report.runs import RunLine
    from trainspec_cli.rundir.memory import Copies
    from trainspec_cli.rundir.paths import RunDir

app = typer.Typer(add_completion=False)

LAST = "last"

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or `last` for the newest below ./runs.")
]

HEADINGS = ("recipe", "status", "step", "loss", "age", "path")
COPIES_HEADINGS = ("size", "step", "on disk", "status", "run")

UNKNOWN, GONE = "unknown", "gone"
"""Nothing says whose copies these are; the run's folder is no more."""
FORSAKEN = (GONE, "done", "stopped", "failed", "killed", "made")
"""Runs of such a status have no processes, and none will start by itself."""

Memory = Annotated[
    bool, typer.Option("--memory", help="List instead the copies of state that runs keep in this host's memory.")
]
ClearMemory = Annotated[
    bool, typer.Option("--clear-memory", help="Remove those copies, but for runs that are running or queued.")
]


@app.command()
def runs(memory: Memory = False, clear_memory: ClearMemory = False, as_json: AsJson = False) -> None:
    """List the runs below ./runs, newest first."""
    if memory or clear_memory:
        _show_copies(clear=clear_memory, as_json=as_json)
        return
    lines = _lines()
    if as_json:
        print(json_text([asdict(line) for line in lines]))
    elif lines:
        print(_table([HEADINGS, *map(_cells, lines)]))
        for line in filter(lambda line: line.damage, lines):
            print(f"damaged: {line.damage}", file=sys.stderr)
    else:
        print("there are no runs below ./runs; `trainspec launch recipe=quickstart` makes one")


def find_own_run(name: str) -> RunDir:
    """As `find_run`, for what believes the run or writes in it. Raises MachineError where others can write in it, or it
    leads elsewhere by a link."""
    from trainspec_cli.trust import check_tree

    run = find_run(name)
    check_tree(run.root)
    return run


def find_run(name: str) -> RunDir:
    """The run that a RUN argument means, to be looked at. Raises RecipeError where there is none, MachineError where it
    is closed to this user."""
    from trainspec_cli.rundir.paths import RunDir

    if name == LAST:
        return RunDir(_newest(_lines()))
    run = RunDir(name)
    with refusing_closed(name):
        holds_run = _is_there(run)
    if not holds_run:
        hint = "`trainspec runs` lists those below ./runs; `last` is the newest of them"
        raise RecipeError(Problem("no_run", f"{name} holds no run", hint=hint))
    return run


@contextmanager
def refusing_closed(name: str) -> Iterator[None]:
    """What another user's run does not let this one read becomes a MachineError."""
    try:
        yield
    except PermissionError as error:
        hint = f"have its owner open it: chmod -R g+rX {shlex.quote(name)}"
        problem = Problem("closed_run", f"{error.filename} is closed to this user", hint=hint, environment=True)
        raise MachineError(problem) from error


def _newest(lines: list[RunLine]) -> str:
    """The path of the newest run that can be read; says which newer ones cannot."""
    for line in lines:
        if not line.damage:
            return line.path
        print(f"{LAST} passes over {line.path}, which is damaged: {line.damage}", file=sys.stderr)
    if lines:
        raise RecipeError(Problem("no_run", "every run below ./runs is damaged", hint="`trainspec runs` says why"))
    raise RecipeError(Problem("no_run", "there are no runs below ./runs", hint="name a run's folder"))


def _is_there(run: RunDir) -> bool:
    """False too for a name that no folder can have."""
    try:
        return run.run_json.exists()
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False


def _lines() -> list[RunLine]:
    from trainspec_cli.launch.job.claim import is_running
    from trainspec_cli.launch.job.folder import RUNS
    from trainspec_cli.launch.slurm.queue import Queue
    from trainspec_cli.report.runs import list_runs

    return list_runs(RUNS, is_running, Queue().holds)


def _show_copies(*, clear: bool, as_json: bool) -> None:
    """Every run's copies on this host, wherever its folder is; `clear` removes those that nothing needs."""
    from trainspec_cli.rundir.memory import list_copies, remove_folder
    from trainspec_cli.units import format_bytes

    rows = [(copies, _status_of_owner(copies.run)) for copies in list_copies()]
    cleared = [copies for copies, status in rows if clear and status in FORSAKEN]
    for copies in cleared:
        remove_folder(copies.folder)
    if as_json:
        print(json_text([_copies_json(*row, cleared=row[0] in cleared) for row in rows]))
    elif not rows:
        print("no run has copies in this host's memory")
    else:
        print(_table([COPIES_HEADINGS, *(_copies_cells(*row) for row in rows)]))
        if clear:
            print(f"\ncleared {format_bytes(sum(copies.bytes for copies in cleared))}")
        elif any(status in FORSAKEN for _, status in rows):
            print("\ntrainspec runs --clear-memory removes those of runs that are not running or queued")


def _status_of_owner(run: RunDir | None) -> str:
    from trainspec_cli.launch.job.claim import is_running
    from trainspec_cli.launch.slurm.queue import Queue
    from trainspec_cli.report.runs import status_of

    if run is None:
        return UNKNOWN
    if not run.run_json.is_file():
        return GONE
    return status_of(run, running=is_running(run), queued=Queue().holds(run))


def _copies_json(copies: Copies, status: str, *, cleared: bool) -> dict[str, object]:
    run = str(copies.run.root) if copies.run else None
    about = {"run": run, "status": status, "step": copies.step, "bytes": copies.bytes}
    return {**about, "folder": str(copies.folder), "cleared": cleared}


def _copies_cells(copies: Copies, status: str) -> tuple[str, ...]:
    from trainspec_cli.units import format_bytes

    on_disk = max(copies.run.checkpoint_steps(), default=0) if copies.run else 0
    where = str(copies.run.root) if copies.run else f"rm -r {copies.folder} removes them"
    return format_bytes(copies.bytes), str(copies.step), str(on_disk or "-"), status, where


def _cells(line: RunLine) -> tuple[str, ...]:
    of = f"/{line.max_steps}" if line.max_steps is not None else ""
    loss = f"{line.loss:.4f}" if line.loss is not None else "-"
    age = format_duration(max(0.0, time.time() - line.created_at))
    return line.recipe, line.status, f"{line.step}{of}", loss, age, line.path


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
