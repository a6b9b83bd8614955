"""What a kill of torchrun, of the supervisor or of whoever reads its output does to a real run."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time

import psutil
import pytest
from lab.waiting import wait_for

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS = 60
RECIPE = (
    "recipe=tiny",
    "checkpoint.interval_steps=null",
    f"train.max_steps={STEPS}",
    "fault=slow(step=5,seconds=0.1,steps=20)",
)
"""Slow at the step that a test waits for, so that it is still running if the test is delayed by seconds."""
LAUNCH = (sys.executable, "-m", "trainspec_cli", "launch")


@pytest.mark.slow
def test_kill_9_of_torchrun_starts_the_run_again(wait_for_step, workers_of, start_trainspec, tmp_path, read_result):
    """No checkpoint was due: the run continues from the one that the workers wrote after they had lost torchrun."""
    process = start_trainspec("launch", *RECIPE, "run.dir=run")
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 5, process)
    workers_of(process)[0].parent().kill()
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "ended by SIGKILL" in said and "again from step " in said
    assert (read_result("run")["status"], read_result("run")["steps"]) == ("done", STEPS)
    steps = [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]
    assert steps == list(range(1, STEPS + 1)), "no step twice, none left out"


@pytest.mark.slow
def test_kill_9_of_a_worker_before_the_first_checkpoint_starts_the_run_from_the_beginning(
    wait_for_step, workers_of, start_trainspec, tmp_path, read_result
):
    process = start_trainspec("launch", *RECIPE, "run.dir=run")
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 5, process)
    workers_of(process)[0].kill()
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert "from the beginning" in said
    result = read_result("run")
    assert (result["status"], result["steps"], len(result["recoveries"])) == ("done", STEPS, 1)
    assert result["recoveries"][0]["lost_steps"] == result["recoveries"][0]["step"] >= 5
    steps = [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]
    assert steps[-STEPS:] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_kill_9_of_the_supervisor_while_workers_start_leaves_nobody(start_trainspec, workers_of, tmp_path):
    """They could stop no sooner than after their first step, and have nothing to save before it."""
    process = start_trainspec("launch", *RECIPE, "run.dir=run", "run.stop_grace_s=600")
    while not any(hears(worker) for worker in find_workers_of_run(process, workers_of, tmp_path / "run")):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    _, alive = psutil.wait_procs(family)
    assert alive == []
    assert not RunDir(tmp_path / "run").checkpoint_steps()


def hears(worker: psutil.Process) -> bool:
    """Return whether the worker handles requests to stop, which it does before it imports torch."""
    try:
        return any("libtorch" in mapped.path for mapped in worker.memory_maps())
    except psutil.Error:
        return False


def find_workers_of_run(process, workers_of, root):
    """The probe of the machine has workers of the same kind."""
    found = []
    for worker in workers_of(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [worker] if worker.cmdline()[-1] == str(root) else []
    return found


def read_until(process: subprocess.Popen[str], beginning: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            break
    process.stdout.close()


@pytest.mark.slow
def test_a_reader_that_goes_away_stops_the_run_with_a_checkpoint(environment, tmp_path, read_result):
    command = [
        *LAUNCH,
        "recipe=tiny",
        "checkpoint.interval_steps=null",
        "train.max_steps=1000000",
        "train.log_interval_steps=1",
        "run.dir=run",
    ]
    command = ["nohup", *command]  # which ignores SIGHUP, and keeps pipes as they are
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdin=-3, stdout=-1, stderr=-1, text=True)
    try:
        read_until(process, "step 2/")
        assert process.wait() == 141
    finally:
        process.kill()
    assert process.stderr is not None
    assert process.stderr.read() == ""
    stopped = read_result("run")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 6)
    assert RunDir(tmp_path / "run").checkpoint_steps() == [stopped["steps"]]


@pytest.mark.slow
def test_a_reader_that_goes_away_before_there_is_a_run_ends_the_command(environment, tmp_path):
    cache = environment | {"TRAINSPEC_CACHE": str(tmp_path / "empty")}
    process = subprocess.Popen(
        [*LAUNCH, *RECIPE, "run.dir=run"], cwd=tmp_path, env=cache, stdout=-1, stderr=subprocess.STDOUT, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait() == 141
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_over_leaves_no_copies_in_memory(trainspec, tmp_path):
    """The first start is killed and leaves some; the second keeps none, and so has no worker that would clear them."""
    first = (
        "recipe=tiny",
        "checkpoint.interval_steps=null",
        "train.max_steps=8",
        "checkpoint.memory_interval_steps=2",
        "run.dir=run",
    )
    killed = trainspec("launch", *first, "fault=kill(step=6)", "resilience=none")
    assert killed.returncode == 5, killed.stdout + killed.stderr
    (listed,) = of_run(trainspec("runs", "--memory", "--json"), tmp_path / "run")
    assert (listed["status"], listed["step"] >= 2, listed["bytes"] > 0) == ("failed", True, True)
    ended = trainspec("resume", "run", "checkpoint.memory_interval_steps=null")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert of_run(trainspec("runs", "--memory", "--json"), tmp_path / "run") == []


def of_run(listed: subprocess.CompletedProcess[str], root) -> list[dict[str, object]]:
    assert listed.returncode == 0, listed.stderr
    return [row for row in json.loads(listed.stdout) if row["run"] == str(root)]


@pytest.mark.slow
def test_an_early_end_that_is_killed_before_it_is_done_ends_at_the_same_step(
    start_trainspec, kill_everything, trainspec, tmp_path, read_result
):
    """At this rate no weight changes, so the second evaluation is no better. Then the run writes text for minutes."""
    recipe = ("recipe=tiny", "optim.lr=1e-15", "train.max_steps=1000", "train.eval_interval_steps=2")
    endless = ("train.early_stop_evals=1", "sample.prompt=a", "sample.max_new_tokens=1000000")
    process = start_trainspec("launch", *recipe, *endless, "run.dir=run")
    run = RunDir(tmp_path / "run")
    wait_for(
        lambda: run.events(0).is_file() and any(e["type"] == "checkpoint" for e in read_events(run.events(0))), process
    )
    kill_everything(process)
    assert run.checkpoint_steps() == [4] and not run.result_json.exists()
    ended = trainspec("resume", "run", "sample.max_new_tokens=0")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "train.early_stop_evals=null" in ended.stdout
    assert (read_result("run")["status"], read_result("run")["steps"]) == ("done", 4)
    assert [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"] == [1, 2, 3, 4]
