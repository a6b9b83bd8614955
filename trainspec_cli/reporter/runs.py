"""The status of a run, and one-line summaries of the runs below a folder. Only the end of each run's events is read."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.json_value import JsonObject, JsonValue, flatten
from trainspec_cli.core.reading.files import read_field
from trainspec_cli.recipe.json_text import finite_or_none, json_text
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.event_types.events import (
    StepEvent,
)
from trainspec_cli.run.folder.events import TAIL_BYTES, read_log
from trainspec_cli.run.folder.files import read_versioned
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan_outline, read_run_record

QUEUED, RUNNING, MADE, KILLED, DAMAGED = "queued", "running", "made", "killed", "damaged"
"""Statuses of a run without a result, in this order: Slurm will start it, for the first time or again; it is alive; it
was created (for Slurm or a sweep) but never started; it was killed; its files cannot be read."""

ALIVE = (QUEUED, RUNNING)
MOST_DIFFERENCES = 3
"""Number of values that a line shows; the remaining ones are only counted."""

Ask = Callable[[RunDir], bool]


def status_of(run: RunDir, *, running: bool, queued: bool) -> str:
    """Return the status in result.json (done, stopped or failed) or, without a result, one of the other statuses."""
    if queued:
        return QUEUED
    if running:
        return RUNNING
    if run.result_json.is_file():
        return read_field(run.result_json, read_versioned(run.result_json), "status", str)
    return KILLED if generations.newest(run) else MADE


@dataclass(frozen=True)
class RunLine:
    path: str
    recipe: str
    status: str
    step: int
    max_steps: int | None
    loss: float | None
    created_at: float
    """Unix time when the run was created or, for a damaged run, when its folder last changed."""
    damage: str = ""
    """Why the run cannot be read; empty if it can."""
    name: str = ""
    """The recipe's `run.name`."""
    tags: tuple[str, ...] = ()
    differs: JsonObject = field(default_factory=dict)
    """The recipe values, by key, that differ between the listed runs of this recipe."""


def list_runs(folder: Path, is_running: Ask, is_queued: Ask, others: Iterable[RunDir] = ()) -> list[RunLine]:
    """Return the runs below a folder and the runs in `others`, newest first. A run that cannot be read is listed as
    damaged. Runs that this user may not read are left out."""
    lines = []
    for run in (*find_runs(folder), *others):
        try:
            record = read_run_record(run)
            step = last_step(run)
            outline = read_plan_outline(run)
            about = outline.spec.get("run")
            tags = about.get("tags") if isinstance(about, dict) else None
            lines.append(
                RunLine(
                    path=str(run.root),
                    recipe=record.recipe,
                    status=status_of(run, running=is_running(run), queued=is_queued(run)),
                    step=step.step if step else 0,
                    max_steps=outline.total_steps,
                    loss=finite_or_none(step.loss) if step else None,
                    created_at=record.created_at,
                    name=name_of(outline.spec),
                    tags=tuple(map(str, tags)) if isinstance(tags, list) else (),
                    differs=flatten(outline.spec),
                )
            )
        except PermissionError:
            continue
        except (TrainspecError, OSError) as error:
            changed_at = 0.0
            with suppress(OSError):  # the folder may have been deleted in the meantime
                changed_at = run.root.stat().st_mtime
            lines.append(RunLine(str(run.root), "-", DAMAGED, 0, None, None, changed_at, damage=str(error)))
    # Different recipes differ in nearly everything, so only runs of the same recipe are compared.
    recipes = {line.recipe: [one for one in lines if one.recipe == line.recipe and not one.damage] for line in lines}
    for alike in recipes.values():
        for line, values in zip(alike, differing([line.differs for line in alike]), strict=True):
            lines[lines.index(line)] = replace(line, differs=values)
    return sorted(lines, key=lambda line: line.created_at, reverse=True)


def differing(specs: Sequence[JsonObject]) -> list[JsonObject]:
    """Return, for each flat recipe, the values that are not the same in all recipes. Excludes the keys of `run`, and
    keys that are missing from some recipes because another version wrote them."""
    shared = [key for key in (specs[0] if specs else {}) if all(key in spec for spec in specs)]
    keys = [key for key in shared if any(spec[key] != specs[0][key] for spec in specs) and not key.startswith("run.")]
    return [{key: spec[key] for key in keys} for spec in specs]


def show_value(value: JsonValue) -> str:
    """Format a value as it would be typed on a command line."""
    return value if isinstance(value, str) else json_text(value, indent=None)


def show_differences(line: RunLine) -> str:
    shown = [f"{key}={show_value(value)}" for key, value in list(line.differs.items())[:MOST_DIFFERENCES]]
    left = len(line.differs) - len(shown)
    return " ".join([*shown, f"and {left} more"] if left else shown)


def find_runs(folder: Path) -> Iterator[RunDir]:
    """Yield the folders that contain a run.json. Folders inside a run are not searched."""
    for root, subfolders, files in os.walk(folder):
        if "run.json" in files:
            # A run may contain thousands of checkpoints and logs, but never another run.
            subfolders.clear()
            yield RunDir(root)


def name_of(spec: JsonObject) -> str:
    """Return `run.name` from a recipe of any version; empty if unset."""
    about = spec.get("run")
    return str(about.get("name") or "") if isinstance(about, dict) else ""


def last_step(run: RunDir) -> StepEvent | None:
    """Return rank 0's newest step event, or None."""
    # Read only the end of the file, so that listing many long runs is fast.
    steps = [event for event in read_log(run.events(0), TAIL_BYTES) if isinstance(event, StepEvent)]
    return steps[-1] if steps else None
