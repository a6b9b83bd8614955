"""The simulation that forecasts goodput, given a real run's failures, loses what the run lost."""

import json
import signal
import statistics

import pytest
from lab.groups import changes, losses, run_events
from lab.waiting import wait_for

from trainspec_cli.planner.run.goodput import SimulatedJob, simulate
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

INTERVAL_STEPS, STEPS = 15, 60


def sleeping(*groups: int) -> str:
    """Steps that last long enough to be counted."""
    return "; ".join(f"slow(group={group},step=1,seconds=0.3,steps=1000)" for group in groups)


@pytest.mark.slow
def test_a_run_that_restarts_loses_what_the_simulation_says(trainspec, tmp_path):
    ended = trainspec(
        *("launch", "recipe=tiny", f"train.max_steps={STEPS}", f"checkpoint.interval_steps={INTERVAL_STEPS}"),
        *("checkpoint.mode=sync", "run.dir=run", "resilience.max_restarts_per_hour=3"),
        f"fault={sleeping(0)}; kill(step=20,rank=1); kill(step=43,rank=1)",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run = RunDir(tmp_path / "run")
    recoveries = json.loads(run.result_json.read_text())["recoveries"]
    assert [r["lost_steps"] for r in recoveries] == [5, 13]
    times_s = [event["step_time_s"] for event in read_events(run.events(0)) if event["type"] == "step"]
    step_time_s, stall_s = statistics.median(times_s), statistics.mean(r["stall_s"] for r in recoveries)
    failures = [20.01 * step_time_s, (20 + 28.01) * step_time_s + stall_s]  # the second run began at step 15
    undone_s = step_time_s * sum(r["lost_steps"] for r in recoveries)  # uneven steps are no failure's cost
    measured_s = undone_s + sum(r["stall_s"] for r in recoveries)

    job = SimulatedJob(STEPS * step_time_s, step_time_s, 1, 1, INTERVAL_STEPS * step_time_s, 0.0, 0.0, 0.0, 0.0)
    takes = ReliabilitySpec(detect_s=0.0, swap_s=0.0, start_s=stall_s)
    simulated = simulate(job, takes, ResilienceSpec("restart"), failures=[(time_s, 0) for time_s in failures])
    simulated_s = simulated.lost_s["restart"] + simulated.lost_s["rework"]
    print(f"lost: measured {measured_s:.2f} s (undone {undone_s:.2f}), simulated {simulated_s:.2f} s")
    assert simulated.lost_s["rework"] == pytest.approx(undone_s, rel=0.2)
    assert simulated_s == pytest.approx(measured_s, rel=0.2)


@pytest.mark.slow
def test_a_run_that_goes_on_without_a_group_loses_what_the_simulation_says(start_trainspec, tmp_path):
    """The batch shrinks while the group is away, as the simulated capacity does: its samples are the lost time. The run
    is stopped some steps after the group is back, which takes a busy machine longer."""
    killed_at = 20
    process = start_trainspec(
        *("launch", "recipe=tiny", "run.dir=run", "resilience=elastic"),
        *("resilience.exchange_timeout_s=20", "resilience.heartbeat_timeout_s=10"),
        *("train.max_steps=1000000", "batching.on_loss=shrink", "optim.schedule.kind=constant"),
        f"fault={sleeping(0, 1)}; kill(group=1,step={killed_at})",
    )
    run = RunDir(tmp_path / "run")
    wait_for(lambda: ("joined", 1) in changes(run), process)
    back_at = run_events(run, "recovery")[-1]["step"]
    wait_for(lambda: max(losses(run)) >= back_at + 30, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    left, joined = json.loads(run.result_json.read_text())["recoveries"]
    assert (left["kind"], joined["kind"]) == ("left", "joined")
    steps = [event for event in read_events(run.events(0)) if event["type"] == "step"]
    at = {event["step"]: event["time"] for event in steps}
    full = max(event["samples"] for event in steps)
    # What samples are missing of a step, that part of its own time is lost: other steps may be slower or faster.
    stalls_s = {left["step"]: left["stall_s"], joined["step"]: joined["stall_s"]}
    takes_s = {event["step"]: event["step_time_s"] - stalls_s.get(event["step"], 0.0) for event in steps}
    shrunk_s = sum(takes_s[event["step"]] * (1 - event["samples"] / full) for event in steps)
    measured_s = shrunk_s + sum(stalls_s.values())

    step_time_s = statistics.median(takes_s.values())
    work_s = step_time_s * sum(event["samples"] for event in steps) / full
    job = SimulatedJob(work_s, step_time_s, 2, 2, work_s, 0.0, 0.0, 0.0, 0.0)
    away_s = at[joined["step"] - 1] - at[killed_at]
    takes = ReliabilitySpec(
        detect_s=0.0, swap_s=0.0, start_s=away_s, shrink_stall_s=left["stall_s"], rejoin_stall_s=joined["stall_s"]
    )
    fails_at_s = (killed_at + 0.01) * step_time_s
    simulated = simulate(job, takes, ResilienceSpec("elastic"), failures=[(fails_at_s, 1)])
    simulated_s = sum(simulated.lost_s.values())
    print(f"lost: measured {measured_s:.2f} s, simulated {simulated_s:.2f} s ({dict(simulated.lost_s)})")
    assert simulated.lost_s["shrunk"] == pytest.approx(shrunk_s, rel=0.2)
    assert simulated_s == pytest.approx(measured_s, rel=0.2)
