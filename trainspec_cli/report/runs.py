"""The runs below a folder, in a line each, without reading more than the end of their events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.report.collect import finite
from trainspec_cli.report.history import Event
from trainspec_cli.report.status import status_of
from trainspec_cli.rundir.events import parse_lines
from trainspec_cli.rundir.files import read_json
from trainspec_cli.rundir.paths import RunDir

TAIL_BYTES = 65_536

Ask = Callable[[RunDir], bool]


@dataclass(frozen=True)
class RunLine:
    path: str
    recipe: str
    status: str
    step: int
    max_steps: int | None
    loss: float | None
    created_at: float
    """Unix seconds."""


def list_runs(folder: Path, is_running: Ask, is_queued: Ask) -> list[RunLine]:
    """Newest first; runs of others that are closed to this user are left out."""
    lines = []
    for run in find_runs(folder):
        with suppress(PermissionError):
            lines.append(_describe(run, is_running, is_queued))
    return sorted(lines, key=lambda line: line.created_at, reverse=True)


def find_runs(folder: Path) -> Iterator[RunDir]:
    """Folders that hold a run.json; what lies inside a run is not looked through."""
    for root, subfolders, files in os.walk(folder):
        if "run.json" in files:
            subfolders.clear()
            yield RunDir(root)


def _describe(run: RunDir, is_running: Ask, is_queued: Ask) -> RunLine:
    about = read_json(run.run_json)
    step = last_step(run)
    return RunLine(
        path=str(run.root),
        recipe=about["recipe"],
        status=status_of(run, running=is_running(run), queued=is_queued(run)),
        step=step.get("step", 0),
        max_steps=read_json(run.plan_json)["spec"]["train"]["max_steps"] if run.plan_json.is_file() else None,
        loss=finite(step.get("loss")),
        created_at=about["created_at"],
    )


def last_step(run: RunDir) -> Event:
    """The newest step event of rank 0; empty before there is one."""
    path = run.events(0)
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        steps = [event for event in parse_lines(file) if event["type"] == "step"]
    return steps[-1] if steps else {}
