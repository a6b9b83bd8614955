"""Runs on the emulated accelerator with virtual time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainspec_cli.run.folder.events import read_events

LAYOUTS = ("layout.dp_replicate=2", "layout.tp=2", "layout.pp=2", "layout.dp_shard=2")
STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_times_are_the_same_in_every_run_and_weights_are_those_of_a_cpu_run(
    layout: str, trainspec, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], tmp_path: Path
) -> None:
    recipe = ("launch", "recipe=tiny", f"train.max_steps={STEPS}", "cluster.devices_per_node=2", layout)
    times = []
    weights = []
    for name, virtual in (("cpu", False), ("one", True), ("other", True)):
        if virtual:
            monkeypatch.setitem(environment, "TRAINSPEC_DEVICE", "emulated")
            monkeypatch.setitem(environment, "TRAINSPEC_EMULATED", "time=h100_sxm,launch_us=0,jitter=0.02")
        ended = trainspec(*recipe, f"run.dir={name}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert not list((tmp_path / name / "logs").glob("*_start002")), "no rank failed"
        weights.append(json.loads((tmp_path / name / "result.json").read_text())["weights_sha256"])
        files = sorted((tmp_path / name / "events").glob("rank*"))
        steps = [event for file in files for event in read_events(file) if event["type"] == "step"]
        times.append({(event["rank"], event["step"]): event["step_time_s"] for event in steps})
    assert weights[0] == weights[1] == weights[2]
    assert len(times[1]) == 2 * STEPS
    assert times[1] == times[2] != times[0]
    assert len(set(times[1].values())) > STEPS  # the noise is in them
