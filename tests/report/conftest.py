"""Run folders written event by event, without a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.rundir.events import PARTS, EventWriter
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir

BEGIN = {
    "world_size": 2,
    "device_name": "a chip",
    "peak_flops": 1e9,
    "peak_source": "best matmul measured",
    "params": 1_500_000,
    "flops_per_token": 1e6,
    "pid": 1,
    "host": "h",
}


class FakeRun:
    """Writes what the workers would, with round numbers: 100 tokens a step, in one second of equal parts."""

    def __init__(self, root: Path):
        self.dir = RunDir(root)

    def start(self, step: int = 0, rank: int = 0) -> None:
        self.write("start", rank, step=step, **BEGIN)

    def step(self, step: int, rank: int = 0, seconds: float = 1.0, loss: float = 2.0, skipped: bool = False) -> None:
        parts = {name: seconds / len(PARTS) for name in PARTS}
        self.write(
            "step",
            rank,
            step=step,
            loss=loss,
            grad_norm=0.5,
            lr=1e-3,
            tokens=100,
            samples=10,
            step_time_s=seconds,
            time_s=parts,
            skipped=skipped,
        )

    def write(self, kind: str, rank: int = 0, **fields: Any) -> None:
        writer = EventWriter(self.dir.events(rank), rank)
        writer.write(kind, **fields)
        writer.close()

    def about(self, **fields: Any) -> None:
        write_json(self.dir.run_json, {"recipe": "tiny", "created_at": 1000.0, **fields})
        write_json(self.dir.plan_json, {"spec": {"train": {"max_steps": 20}}})

    def result(self, **fields: Any) -> None:
        write_json(self.dir.result_json, {"status": "done", "exit_code": 0, **fields})


@pytest.fixture
def fake_run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "run")
