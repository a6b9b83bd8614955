"""The runs below a folder, in a line each, without reading more than the end of their events."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.errors import TrainspecError
from trainspec_cli.report.collect import finite
from trainspec_cli.report.history import Event
from trainspec_cli.report.status import DAMAGED, status_of
from trainspec_cli.rundir.events import read_story
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_about, read_max_steps

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
    about = read_about(run)
    step = last_step(run)
    return RunLine(
        path=str(run.root),
        recipe=about["recipe"],
        status=status_of(run, running=is_running(run), queued=is_queued(run)),
        step=step.get("step", 0),
        max_steps=read_max_steps(run),
        loss=finite(step.get("loss")),
        created_at=about["created_at"],
    )


def last_step(run: RunDir) -> Event:
    """The newest step event of rank 0; empty before there is one."""
    steps = [event for event in read_story(run.events(0), TAIL_BYTES) if event["type"] == "step"]
    return steps[-1] if steps else {}
