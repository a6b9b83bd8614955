"""`trainspec runs`: the runs below ./runs, newest first; or what runs have left in this node's memory, and learned of
it."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.launch.memory_limits import Learned, MemoryLimits, forget_limits, list_limits
from trainspec_cli.report.runs import RunLine
from trainspec_cli.rundir.memory import Copies, list_copies, remove_folder
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.session.find import runs_here, status_of_run
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.units import format_bytes, format_duration

HEADINGS = ("recipe", "status", "step", "loss", "age", "path")
COPIES_HEADINGS = ("size", "step", "on disk", "status", "run")
LIMITS_HEADINGS = ("model", "layout", "device", "memory ran out with", "taken instead", "age", "run")

UNKNOWN, GONE = "unknown", "gone"
"""Nothing says whose copies these are; the run's folder is no more."""
FORSAKEN = (GONE, "done", "stopped", "failed", "killed", "made")
"""Runs of such a status have no processes, and none will start by itself."""

Memory = Annotated[
    bool, typer.Option("--memory", help="List instead the copies of state that runs keep in this node's memory.")
]
ClearMemory = Annotated[
    bool, typer.Option("--clear-memory", help="Remove those copies, but for runs that are running or queued.")
]
Limits = Annotated[
    bool, typer.Option("--limits", help="List instead the settings with which memory has run out on this machine.")
]
ClearLimits = Annotated[bool, typer.Option("--clear-limits", help="Forget these settings: launches try them again.")]


def runs(
    memory: Memory = False,
    clear_memory: ClearMemory = False,
    limits: Limits = False,
    clear_limits: ClearLimits = False,
    as_json: AsJson = False,
) -> None:
    """List the runs below ./runs, newest first."""
    if limits or clear_limits:
        _show_limits(clear=clear_limits, as_json=as_json)
        return
    if memory or clear_memory:
        _show_copies(clear=clear_memory, as_json=as_json)
        return
    lines = runs_here()
    if as_json:
        print(json_text([asdict(line) for line in lines]))
    elif lines:
        print(_table([HEADINGS, *map(_cells, lines)]))
        for line in filter(lambda line: line.damage, lines):
            print(f"damaged: {line.damage}", file=sys.stderr)
    else:
        print("there are no runs below ./runs; `trainspec launch recipe=quickstart` makes one")


def _show_limits(*, clear: bool, as_json: bool) -> None:
    """List what runs on this machine had to take for want of memory; `clear` forgets it."""
    found = [limits for _, limits in list_limits()]
    if clear:
        forget_limits()
    if as_json:
        print(json_text([{**to_plain(limits), "cleared": clear} for limits in found]))
    elif not found:
        print("no run has run out of memory on this machine")
    else:
        rows = [_limit_cells(limits, learned) for limits in found for learned in limits.learned]
        print(_table([LIMITS_HEADINGS, *rows]))
        print("\nforgotten" if clear else "\ntrainspec runs --clear-limits forgets them")


def _limit_cells(limits: MemoryLimits, learned: Learned) -> tuple[str, ...]:
    relief = learned.relief
    instead, age = relief.taken.describe(relief.failed), format_duration(max(0.0, time.time() - learned.at))
    return limits.model, limits.layout, limits.device, relief.failed.describe(), instead, age, learned.run


def _show_copies(*, clear: bool, as_json: bool) -> None:
    """List every run's copies on this node, wherever its folder is; `clear` removes those that nothing needs."""
    rows = [(copies, _status_of_owner(copies.run)) for copies in list_copies()]
    cleared = [copies for copies, status in rows if clear and status in FORSAKEN]
    for copies in cleared:
        remove_folder(copies.folder)
    if as_json:
        print(json_text([_copies_json(*row, cleared=row[0] in cleared) for row in rows]))
    elif not rows:
        print("no run has copies in this node's memory")
    else:
        print(_table([COPIES_HEADINGS, *(_copies_cells(*row) for row in rows)]))
        if clear:
            print(f"\ncleared {format_bytes(sum(copies.bytes for copies in cleared))}")
        elif any(status in FORSAKEN for _, status in rows):
            print("\ntrainspec runs --clear-memory removes those of runs that are not running or queued")


def _status_of_owner(run: RunDir | None) -> str:
    if run is None:
        return UNKNOWN
    if not run.run_json.is_file():
        return GONE
    return status_of_run(run)


def _copies_json(copies: Copies, status: str, *, cleared: bool) -> dict[str, object]:
    run = str(copies.run.root) if copies.run else None
    about = {"run": run, "status": status, "step": copies.step, "bytes": copies.bytes}
    return {**about, "folder": str(copies.folder), "cleared": cleared}


def _copies_cells(copies: Copies, status: str) -> tuple[str, ...]:
    on_disk = copies.run.newest_step if copies.run else 0
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
