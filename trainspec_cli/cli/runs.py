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
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
    elif lines:
        typer.echo(_table([HEADINGS, *map(_cells, lines)]))
        for line in filter(lambda line: line.damage, lines):
            typer.echo(f"damaged: {line.damage}", err=True)
    else:
        typer.echo("there are no runs below ./runs; `trainspec launch recipe=quickstart` makes one")


def find_run(name: str) -> RunDir:
    """The run that a RUN argument means. Raises RecipeError where there is none."""
    from trainspec_cli.rundir.paths import RunDir

    if name == LAST:
        return RunDir(_newest(_lines()))
    run = RunDir(name)
    if not _is_there(run):
        hint = "`trainspec runs` lists those below ./runs; `last` is the newest of them"
        raise RecipeError(Problem("no_run", f"{name} holds no run", hint=hint))
    return run


def _newest(lines: list[RunLine]) -> str:
    """The path of the newest run that can be read; says which newer ones cannot."""
    for line in lines:
        if not line.damage:
            return line.path
        typer.echo(f"{LAST} passes over {line.path}, which is damaged: {line.damage}", err=True)
    if lines:
        raise RecipeError(Problem("no_run", "every run below ./runs is damaged", hint="`trainspec runs` says why"))
    raise RecipeError(Problem("no_run", "there are no runs below ./runs", hint="name a run's folder"))


def _is_there(run: RunDir) -> bool:
    """False too for a name that no folder can have."""
    try:
        return run.run_json.exists()
    except (OSError, ValueError):
        return False


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
