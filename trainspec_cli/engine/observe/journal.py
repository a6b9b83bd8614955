"""What a worker leaves behind while it runs: its events, and rank 0 the same elsewhere, for those who look there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainspec_cli.engine.observe.mlflow import MlflowLog
from trainspec_cli.engine.observe.tensorboard import TensorBoardLog
from trainspec_cli.engine.observe.wandb import WandbLog
from trainspec_cli.rundir.events import EventWriter
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.recipe.run import RunSpec


class Tracker(Protocol):
    def record(self, kind: str, fields: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


TRACKERS: dict[str, Callable[[RunDir, RunSpec], Tracker]] = {
    "tensorboard": lambda run_dir, _spec: TensorBoardLog(run_dir.root / "tensorboard"),
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}
"""By the key of `tracking` that wants it."""

Fields = dict[str, Any]


class Journal:
    def __init__(self, run_dir: RunDir, rank: int, spec: RunSpec | None):
        """Without a spec nothing is told elsewhere."""
        self._run_dir = run_dir
        self._events = EventWriter(run_dir.events(rank), rank)
        self._fence = Fence.of_worker(run_dir)
        told = spec if rank == 0 else None
        self._trackers = [make(run_dir, told) for key, make in TRACKERS.items() if told and getattr(told.tracking, key)]

    def write(self, kind: str, **fields: Any) -> None:
        """Raises WorkerError where a newer start owns the run."""
        self._fence.check_now_and_then()
        self._events.write(kind, **fields)
        for tracker in self._trackers:
            tracker.record(kind, fields)

    def events_of(self, rank: int) -> Path:
        """Where another rank writes its own."""
        return self._run_dir.events(rank)

    def close(self) -> None:
        self._events.close()
        for tracker in self._trackers:
            tracker.close()


class GroupJournal:
    """Of a process of a replica group: its own events, and while its group leads, the run's story too."""

    def __init__(self, run_dir: RunDir, group: int, rank: int, spec: RunSpec):
        self._run_dir, self._tells, self._spec = run_dir, rank == 0, spec
        self._own = EventWriter(run_dir.group_events(group, rank), rank)
        self._group = group
        self._story: Journal | None = None
        self._start: Fields = {}

    def events_of(self, rank: int) -> Path:
        """Where another rank of the same group writes its own."""
        return self._run_dir.group_events(self._group, rank)

    def write(self, kind: str, **fields: Any) -> None:
        if kind == "start":
            self._start = fields
        self._own.write(kind, **fields)
        if self._story:
            self._story.write(kind, **fields)

    def lead(self, leads: bool, step: int) -> None:
        """Whether this group tells the story from `step` on; a new teller begins with a `start` of its own."""
        if leads and self._tells and self._story is None:
            self._story = Journal(self._run_dir, 0, self._spec)
            self._story.write("start", **{**self._start, "step": step})
        elif not leads:
            self._close_story()

    def _close_story(self) -> None:
        if self._story:
            self._story.close()
            self._story = None

    def close(self) -> None:
        self._close_story()
        self._own.close()
