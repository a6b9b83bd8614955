"""Short runs on this machine calibrate the prediction of a layout that was not among them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.run.job.machine import detect
from trainspec_cli.session.recipe.load import profile_path, read_profile

OTHER = ("layout.dp_shard=2", "layout.dp_replicate=1", "layout.zero_stage=2", "batching.micro_batch_size=2")


@pytest.mark.slow
def test_short_runs_calibrate_another_layout(
    tmp_path: Path, measured_cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cache/machine").mkdir(parents=True)
    for probe in (measured_cache / "machine").glob("probe-*.json"):
        # With its time: one that other programs disturbed would be measured again between the launches.
        shutil.copy2(probe, tmp_path / "cache/machine")
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert detect(look_for_gpus=False).cpu_cores
    assert run(["calibrate", "recipe=tiny", "--layouts", "2", "--steps", "20"]) == 0
    profile = read_profile(profile_path("cpu"))
    assert profile.rows == 2
    fixed = ("launch", "recipe=tiny", *OTHER, "scheduler=off")
    assert run([*fixed, "run.dir=shipped", "cluster.profile=off"]) == 0
    assert "profile of cpu" not in capfd.readouterr().out
    assert run([*fixed, "run.dir=calibrated"]) == 0
    assert "profile of cpu" in capfd.readouterr().out
    shipped, calibrated = (predicted_s(tmp_path / name) for name in ("shipped", "calibrated"))
    for part, factor in profile.factors.items():
        if part in shipped and shipped[part] > 0:
            assert calibrated[part] != pytest.approx(shipped[part], rel=0.02) or factor == pytest.approx(1, abs=0.1)


def predicted_s(run_dir: Path) -> dict[str, float]:
    """Return the seconds of a step by part that the launch predicted; how near they are is the load's."""
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    return dict(plan["prediction"]["time_s"])
