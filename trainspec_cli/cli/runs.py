"""`trainspec runs`: the runs below ./runs, newest first."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.units import format_duration

if TYPE_CHECKING:
    from trainspec_cli.report.runs import RunLine
    from trainspec_cli.rundir.paths import RunDir

app = typer.Typer(add_completion=False)

LAST = "last"

RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or `last` for the newest below ./runs.")
]

HEADINGS = ("recipe", "status", "step", "loss", "age", "path")


@app.command()
def runs(as_json: AsJson = False) -> None:
    """List the runs below ./runs, newest first."""
    lines = _lines()
    if as_json:
        print(json.dumps([asdict(line) for line in lines], indent=2))
    elif lines:
        print(_table([HEADINGS, *map(_cells, lines)]))
    else:
        print("there are no runs below ./runs; `trainspec launch recipe=quickstart` makes one")


def find_run(name: str) -> RunDir:
    """The run that a RUN argument means. Raises RecipeError where there is none."""
    from trainspec_cli.rundir.paths import RunDir

    if name == LAST:
        lines = _lines()
        if not lines:
            raise RecipeError(Problem("no_run", "there are no runs below ./runs", hint="name a run's folder"))
        return RunDir(lines[0].path)
    run = RunDir(name)
    if not run.run_json.is_file():
        hint = "`trainspec runs` lists those below ./runs; `last` is the newest of them"
        raise RecipeError(Problem("no_run", f"{name} holds no run", hint=hint))
    return run


def _lines() -> list[RunLine]:
    from trainspec_cli.launch.claim import is_running
    from trainspec_cli.launch.folder import RUNS
    from trainspec_cli.launch.slurm.queue import Queue
    from trainspec_cli.report.runs import list_runs

    return list_runs(RUNS, is_running, Queue().holds)


def _cells(line: RunLine) -> tuple[str, ...]:
    of = f"/{line.max_steps}" if line.max_steps is not None else ""
    loss = f"{line.loss:.4f}" if line.loss is not None else "-"
    age = format_duration(max(0.0, time.time() - line.created_at))
    return line.recipe, line.status, f"{line.step}{of}", loss, age, line.path


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    lines = ("  ".join(map(str.ljust, row, widths)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
