"""What a worker leaves behind while it runs: its events, and rank 0 the same elsewhere, for those who look there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from trainspec_cli.engine.observe.mlflow import MlflowLog
from trainspec_cli.engine.observe.tensorboard import TensorBoardLog
from trainspec_cli.engine.observe.wandb import WandbLog
from trainspec_cli.rundir.events import EventWriter
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.run import RunSpec


class Tracker(Protocol):
    def record(self, kind: str, fields: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


TRACKERS: dict[str, Callable[[RunDir, RunSpec], Tracker]] = {
    "tensorboard": lambda run_dir, _spec: TensorBoardLog(run_dir.root / "tensorboard"),
    "wandb": WandbLog,
    "mlflow": MlflowLog,
}
"""By the key of `tracking` that wants it."""


class Journal:
    def __init__(self, run_dir: RunDir, rank: int, spec: RunSpec):
        self._events = EventWriter(run_dir.events(rank), rank)
        wanted = [make for key, make in TRACKERS.items() if rank == 0 and getattr(spec.tracking, key)]
        self._trackers = [make(run_dir, spec) for make in wanted]

    def write(self, kind: str, **fields: Any) -> None:
        self._events.write(kind, **fields)
        for tracker in self._trackers:
            tracker.record(kind, fields)

    def close(self) -> None:
        self._events.close()
        for tracker in self._trackers:
            tracker.close()
