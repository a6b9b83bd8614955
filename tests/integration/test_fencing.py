"""A worker of an earlier start that survives writes nothing once the run has started again."""

from __future__ import annotations

import pytest
from lab.waiting import wait_for

from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir


def steps_of(run: RunDir) -> list[int]:
    return [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]


@pytest.mark.clause("LAUNCH-5")
@pytest.mark.slow
def test_a_worker_stops_when_a_newer_start_owns_the_run(start_trainspec, tmp_path) -> None:
    run = RunDir(tmp_path / "run")
    endless = ("train.max_steps=1000000", "checkpoint.interval_steps=1000000", "batching.global_batch_size=2")
    process = start_trainspec("launch", "recipe=tiny", *endless, "run.dir=run")
    wait_for(lambda: len(steps_of(run)) >= 5, process)
    assert generations.newest(run) == 1
    assert generations.begin(run) == 2
    said = process.communicate()[0]
    assert process.returncode == 5, said
    assert "fenced off: start 2" in said
    assert run.checkpoint_steps() == []
    assert not run.result_json.exists()
    assert not list(run.errors_folder.glob("*"))
