"""What a worker leaves behind while it runs: its events, and rank 0 its TensorBoard."""

from __future__ import annotations

from typing import Any

from trainspec_cli.engine.observe.tensorboard import TensorBoardLog
from trainspec_cli.rundir.events import EventWriter
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir


class Journal:
    def __init__(self, run_dir: RunDir, rank: int, *, tensorboard: bool):
        self._events = EventWriter(run_dir.events(rank), rank)
        self._fence = Fence.of_worker(run_dir)
        self._board = TensorBoardLog(run_dir.root / "tensorboard") if tensorboard and rank == 0 else None

    def write(self, kind: str, **fields: Any) -> None:
        """Raises WorkerError where a newer start owns the run."""
        self._fence.check_now_and_then()
        self._events.write(kind, **fields)
        if self._board:
            self._board.record(kind, fields)

    def close(self) -> None:
        self._events.close()
        if self._board:
            self._board.close()
