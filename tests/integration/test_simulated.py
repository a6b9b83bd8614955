"""The simulation that forecasts goodput, given a real run's failures, loses what the run lost."""

import json
import statistics

import pytest

from trainspec_cli.planner.goodput import Job, simulate
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.reliability import ReliabilitySpec
from trainspec_cli.spec.resilience import ResilienceSpec

INTERVAL_STEPS, STEPS = 15, 60


@pytest.mark.slow
def test_a_run_that_restarts_loses_what_the_simulation_says(trainspec, tmp_path):
    ended = trainspec(
        *("launch", "recipe=tiny", f"train.max_steps={STEPS}", f"checkpoint.interval_steps={INTERVAL_STEPS}"),
        *("checkpoint.mode=sync", "run.dir=run", "resilience.max_restarts_per_hour=3"),
        "fault=slow(step=1,seconds=0.3,steps=1000); kill(step=20,rank=1); kill(step=43,rank=1)",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(tmp_path / "run")
    recoveries = json.loads(run.result_json.read_text())["recoveries"]
    assert [r["lost_steps"] for r in recoveries] == [5, 13]
    steps = [event for event in read_events(run.events(0)) if event["type"] in ("step", "recovery")]
    begin = steps[0]["time"] - steps[0]["step_time_s"]
    failures = [steps[i - 1]["time"] - begin for i, event in enumerate(steps) if event["type"] == "recovery"]
    times_s = [event["step_time_s"] for event in steps if event["type"] == "step"]
    undone = [event for i, event in enumerate(steps) if any(e["step"] == event["step"] for e in steps[i + 1 :])]
    undone_s = sum(event["step_time_s"] for event in undone if event["type"] == "step")
    measured_s = undone_s + sum(r["stall_s"] for r in recoveries)

    step_time_s, stall_s = statistics.median(times_s), statistics.mean(r["stall_s"] for r in recoveries)
    job = Job(STEPS * step_time_s, step_time_s, 1, 1, INTERVAL_STEPS * step_time_s, 0.0, 0.0, 0.0, 0.0)
    takes = ReliabilitySpec(detect_s=0.0, swap_s=0.0, start_s=stall_s)
    simulated = simulate(job, takes, ResilienceSpec("restart"), failures=[(time_s, 0) for time_s in failures])
    simulated_s = simulated.lost_s["restart"] + simulated.lost_s["rework"]
    print(f"lost: measured {measured_s:.2f} s (undone {undone_s:.2f}), simulated {simulated_s:.2f} s")
    assert simulated.lost_s["rework"] == pytest.approx(undone_s, rel=0.2)
    assert simulated_s == pytest.approx(measured_s, rel=0.2)
