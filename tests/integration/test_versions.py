"""A run of an earlier version can be resumed, before and after its files are migrated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainspec_cli.run.folder.event_types.events import StepEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_result

FILES = Path(__file__).parents[1] / "recipe" / "versions" / "0.1"
LAYOUT = ("layout.cp=1", "layout.tp=1", "layout.ep=1", "layout.pp=1")


@pytest.mark.slow
@pytest.mark.clause("VER-3")
def test_a_run_of_0_1_is_resumed_with_and_without_a_migration(trainspec, tmp_path: Path) -> None:
    weights = []
    for name in ("as_it_is", "migrated"):
        run = RunDir(shutil.copytree(FILES / "run", tmp_path / name))
        about = json.loads(run.run_json.read_text())
        run.run_json.write_text(json.dumps(about | {"data_dir": str(FILES / "data")}))
        if name == "migrated":
            assert trainspec("migrate", name).returncode == 0
        resumed = trainspec("resume", name, "train.max_steps=8", *LAYOUT)
        assert resumed.returncode == 0, resumed.stdout + resumed.stderr
        result = read_result(run)
        assert result is not None and (result.status, result.steps) == ("done", 8)
        weights.append(result.weights_sha256)
        steps = [event.step for event in read_log(run.events(0)) if isinstance(event, StepEvent)]
        assert steps == [*range(1, 9)]
    assert len(set(weights)) == 1
