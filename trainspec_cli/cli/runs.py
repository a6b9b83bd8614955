"""`trainspec runs`: list, compare or remove the runs in this folder; or list the state that runs keep in this node's
memory, and the settings that ran out of memory."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.printable import aligned, format_bytes, format_duration
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.compare import MOST_RUNS, comparison_as_json, render_comparison
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.runs import RunLine, show_differences
from trainspec_cli.run.folder.memory import list_copies, remove_folder
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.memory_limits import forget_limits, list_limits
from trainspec_cli.session.runs import removal
from trainspec_cli.session.runs.find import collect_run, runs_here, status_of_run

HEADINGS = ("recipe", "name", "status", "step", "loss", "age", "path", "differs")
COPIES_HEADINGS = ("size", "step", "on disk", "status", "run")
LIMITS_HEADINGS = ("model", "layout", "device", "out of memory with", "used instead", "age", "run")

DAY_S = 86_400.0
UNKNOWN, GONE = "unknown", "gone"
"""Status of copies whose run no longer exists."""
FORSAKEN = (GONE, "done", "stopped", "failed", "killed", "made")
"""Statuses of runs that have no processes and will not start on their own."""

Memory = Annotated[
    bool, typer.Option("--memory", help="Instead list the copies of state that runs keep in this node's memory.")
]
ClearMemory = Annotated[
    bool,
    typer.Option(
        "--clear-memory",
        help="Remove copies of state from this node's memory, except those of runs that are running or queued.",
    ),
]
Limits = Annotated[
    bool, typer.Option("--limits", help="Instead list the settings that ran out of memory on this machine.")
]
ClearLimits = Annotated[
    bool,
    typer.Option("--clear-limits", help="Forget the settings that ran out of memory; launches will try them again."),
]


app = typer.Typer(add_completion=False)

Tag = Annotated[list[str] | None, typer.Option("--tag", metavar="WORD", help="List runs with this tag (`run.tags`).")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Runs = Annotated[list[str], typer.Argument(metavar="RUN", help="Folders or names of runs, or `last`.")]


@app.callback(invoke_without_command=True)
def runs(
    context: typer.Context,
    tag: Tag = None,
    memory: Memory = False,
    clear_memory: ClearMemory = False,
    limits: Limits = False,
    clear_limits: ClearLimits = False,
    as_json: AsJson = False,
) -> None:
    """List the runs below this folder or launched from it, newest first, with the values that differ between runs of
    the same recipe."""
    # typer also calls this function for `runs compare`.
    if context.invoked_subcommand:
        return
    if limits or clear_limits:
        _show_limits(clear=clear_limits, as_json=as_json)
        return
    if memory or clear_memory:
        _show_copies(clear=clear_memory, as_json=as_json)
        return
    lines = [line for line in runs_here() if set(tag or ()) <= set(line.tags)]
    if as_json:
        print(json_text([asdict(line) for line in lines]))
    elif lines:
        columns = zip(HEADINGS, *map(_cells, lines), strict=True)
        filled = [column for column in columns if any(column[1:])]  # columns that would be empty are omitted
        print("\n".join(aligned(list(zip(*filled, strict=True)))))
        for line in filter(lambda line: line.damage, lines):
            print(f"damaged: {line.damage}", file=sys.stderr)
    else:
        print("there are no runs below ./runs, and none was launched from here")
        print("`trainspec launch recipe=quickstart` creates one")


def _show_limits(*, clear: bool, as_json: bool) -> None:
    """List the settings that runs on this machine switched to after running out of memory; `clear` removes them."""
    found = [limits for _, limits in list_limits()]
    if clear:
        forget_limits()
    if as_json:
        print(json_text([{**to_plain(limits), "cleared": clear} for limits in found]))
    elif not found:
        print("no run has run out of memory on this machine")
    else:
        rows: list[tuple[str, ...]] = [LIMITS_HEADINGS]
        for limits in found:
            for learned in limits.learned:
                relief = learned.relief
                instead = relief.taken.describe(relief.failed)
                age = format_duration(max(0.0, time.time() - learned.at))
                about = (limits.model, limits.layout, limits.device)
                rows.append((*about, relief.failed.describe(), instead, age, learned.run))
        print("\n".join(aligned(rows)))
        print("\nforgotten" if clear else "\ntrainspec runs --clear-limits forgets them")


def _show_copies(*, clear: bool, as_json: bool) -> None:
    """List the copies of all runs on this node; `clear` removes those that are no longer needed."""
    rows = [(copies, _status_of_owner(copies.run)) for copies in list_copies()]
    cleared = [copies for copies, status in rows if clear and status in FORSAKEN]
    for copies in cleared:
        remove_folder(copies.folder)
    if as_json:
        shown = [
            {
                "run": str(copies.run.root) if copies.run else None,
                "status": status,
                "step": copies.step,
                "bytes": copies.bytes,
                "folder": str(copies.folder),
                "cleared": copies in cleared,
            }
            for copies, status in rows
        ]
        print(json_text(shown))
    elif not rows:
        print("no run has copies in this node's memory")
    else:
        cells: list[tuple[str, ...]] = [COPIES_HEADINGS]
        for copies, status in rows:
            on_disk = copies.run.newest_step if copies.run else 0
            where = str(copies.run.root) if copies.run else f"rm -r {copies.folder} removes them"
            cells.append((format_bytes(copies.bytes), str(copies.step), str(on_disk or "-"), status, where))
        print("\n".join(aligned(cells)))
        if clear:
            print(f"\ncleared {format_bytes(sum(copies.bytes for copies in cleared))}")
        elif any(status in FORSAKEN for _, status in rows):
            print("\ntrainspec runs --clear-memory removes the copies of runs that are not running or queued")


def _status_of_owner(run: RunDir | None) -> str:
    if run is None:
        return UNKNOWN
    if not run.run_json.is_file():
        return GONE
    return status_of_run(run)


def _cells(line: RunLine) -> tuple[str, ...]:
    of = f"/{line.max_steps}" if line.max_steps is not None else ""
    loss = f"{line.loss:.4f}" if line.loss is not None else "-"
    age = format_duration(max(0.0, time.time() - line.created_at))
    name = " ".join(filter(None, [line.name, *(f"#{tag}" for tag in line.tags)]))
    return line.recipe, name, line.status, f"{line.step}{of}", loss, age, line.path, show_differences(line)


@app.command()
def compare(runs: Runs, as_json: AsJson = False) -> None:
    """Compare runs: the values that differ, how they ended, and their losses in one chart."""
    if not 2 <= len(runs) <= MOST_RUNS:
        message = f"{len(runs)} run{'s'[: len(runs) != 1]} cannot be compared; specify 2 to {MOST_RUNS}"
        raise RecipeError(Problem("usage", message, "RUN", "such as trainspec runs compare A B"))
    reports = [collect_run(name) for name in runs]
    if as_json:
        print(json_text(comparison_as_json(reports)))
    else:
        PrintableConsole().report(render_comparison(reports, PrintableConsole().width))


@app.command()
def rm(runs: Runs, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove runs with all their files. A run in progress is not removed."""
    _remove(removal.plan_removal(runs), yes=yes, as_json=as_json)


@app.command()
def prune(
    status: Annotated[
        list[str] | None,
        typer.Option(metavar="STATUS", help="Only runs with this status: done, stopped, failed, killed, made."),
    ] = None,
    older_than: Annotated[float, typer.Option(metavar="DAYS", help="Only runs older than this.")] = 0.0,
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Remove only checkpoints: all except each run's newest and best.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove runs below ./runs that failed or were killed, or checkpoints that are no longer needed."""
    # By default, entire runs are removed only if they failed or were killed; checkpoints are also removed from other
    # runs.
    statuses = status or (FORSAKEN[1:] if checkpoints else ("failed", "killed"))
    if wrong := sorted({*statuses} - {*FORSAKEN[1:]}):
        message = f"--status is {', '.join(wrong)}"
        hint = f"one of {', '.join(FORSAKEN[1:])}"
        raise RecipeError(Problem("usage", message, "--status", hint))
    if not 0 <= older_than < math.inf:
        raise RecipeError(
            Problem("usage", f"--older-than is {older_than:g}", "--older-than", "specify the number of days, 0 or more")
        )
    _remove(list(removal.plan_pruning(statuses, older_than * DAY_S, checkpoints=checkpoints)), yes=yes, as_json=as_json)


def _remove(removals: Sequence[removal.Removal], *, yes: bool, as_json: bool) -> None:
    """List what will be removed and how much space that frees, ask for confirmation, and remove it."""
    freed = format_bytes(sum(one.bytes for one in removals))
    if not as_json:
        print("\n".join(map(_describe_removal, removals)) or "there is nothing to remove")
    if removals and not yes:
        # A script without --yes must not hang at a prompt.
        if as_json or not sys.stdin.isatty():
            hint = "add --yes"
            raise RecipeError(
                Problem("usage", f"{freed} would be removed, but there is no terminal to confirm it on", "--yes", hint)
            )
        typer.confirm(f"remove this and free {freed}?", abort=True)
    for one in removals:
        removal.remove(one)
    if as_json:
        shown = [
            {"run": str(one.run.root), "folders": [*map(str, one.folders)], "bytes": one.bytes} for one in removals
        ]
        print(json_text(shown))
    elif removals:
        print(f"removed, freeing {freed}")


def _describe_removal(one: removal.Removal) -> str:
    many = len(one.folders) > 1
    what = "" if one.is_whole else f"  {len(one.folders)} checkpoint{'s'[:many]} of"
    began = f"  ({', '.join(one.begun_with_it)} started from its weights)" if one.begun_with_it else ""
    return f"{format_bytes(one.bytes):>10}  {one.status:<8}{what}  {one.run.root}{began}"
