"""Whole runs whose batch changes: the samples of the recipe, in the steps that the plan counts, to the bit."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from integration.conftest import slow_from

from trainspec_cli.balance.batch.batch import count_steps, schedule_batches
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

BATCH = 8  # of recipe=tiny
NOISE = (
    "recipe=tiny",
    "train.max_steps=120",
    "batching=noise",
    "batching.schedule.max_global_batch_size=64",
    "batching.schedule.interval_steps=3",
    "batching.schedule.smoothing_steps=4",
    "checkpoint.interval_steps=4",
)


def steps_of(run: RunDir) -> list[dict[str, Any]]:
    """Where a step occurs twice the later one is true."""
    return list({event["step"]: event for event in read_events(run.events(0)) if event["type"] == "step"}.values())


@pytest.mark.slow
def test_seesaw_trains_the_samples_of_the_recipe_in_the_steps_of_the_plan(trainspec, tmp_path: Path) -> None:
    ended = trainspec("launch", "recipe=tiny", "batching=seesaw", "train.max_steps=40", "run.dir=run")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(tmp_path / "run")
    steps, plan = steps_of(run), read_plan(run)
    assert sum(step["samples"] for step in steps) == 40 * BATCH
    assert [step["step"] for step in steps] == list(range(1, 1 + count_steps(schedule_batches(plan.spec))))
    assert len(steps) == plan.total_steps < 40
    sizes = [step["samples"] for step in steps]
    assert all(size <= following for size, following in pairwise(sizes[:-1])) and max(sizes[:-1]) > BATCH
    refused = trainspec("resume", "run")
    assert refused.returncode == 2
    assert f"has trained on {40 * BATCH} samples" in " ".join((refused.stdout + refused.stderr).split())


@pytest.mark.slow
def test_a_killed_run_that_follows_the_noise_ends_as_one_that_nobody_touched(
    trainspec, start_trainspec, wait_for_step, kill_everything, read_result, tmp_path: Path
) -> None:
    whole, killed = RunDir(tmp_path / "whole"), RunDir(tmp_path / "killed")
    ended = trainspec("launch", *NOISE, "run.dir=whole")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    process = start_trainspec("launch", *NOISE, "run.dir=killed", slow_from(8))
    wait_for_step(killed, 14, process)
    kill_everything(process)
    assert killed.newest_step < len(steps_of(whole)), "it was in the middle"
    ended = trainspec("resume", "killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = [[(step["step"], step["samples"], step["noise_scale"]) for step in steps_of(run)] for run in (whole, killed)]
    assert told[0] == told[1]
    assert max(samples for _, samples, _ in told[0][:-1]) > BATCH, "the batch has grown"
    assert sum(samples for _, samples, _ in told[0]) == 120 * BATCH
    assert read_result("killed")["weights_sha256"] == read_result("whole")["weights_sha256"]
    assert any(event["type"] == "start" and event["step"] >= 4 for event in read_events(killed.events(0)))
