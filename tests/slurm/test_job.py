"""Runs on a real Slurm of two nodes: submitted, waited for, stopped, requeued and resumed."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from lab.cluster import Cluster

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir

LONG = ("train.max_steps=120", "checkpoint.interval_steps=10", "fault=slow(step=15,seconds=0.3,steps=20)")
"""Slow at the step that a test waits for, so that it is still running if the test is delayed by seconds."""
PATIENT = "resilience.heartbeat_timeout_s=3"


@pytest.mark.slow
def test_a_run_on_two_nodes_ends_with_its_own_exit_code(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    run = tmp_path / "runs/done"
    ended = slurm.wait(sbatch("run.dir=runs/done"))
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), watch.log(run)
    assert watch.steps(run) == list(range(1, 21))
    assert read_result("runs/done")["status"] == "done"
    starts = [next(read_events(RunDir(run).events(rank))) for rank in (0, 1)]
    assert [start["world_size"] for start in starts] == [2, 2]


@pytest.mark.slow
def test_workers_get_the_variables_of_the_blueprint_and_keep_those_of_the_job(
    slurm: Cluster, environment: dict[str, str], write_script, watch, tmp_path: Path
) -> None:
    """NCCL has none on CPUs, so that the plan is given some before its job starts."""
    write_script(*LONG, "run.dir=run", "fabric=ethernet")
    file = RunDir(tmp_path / "run").plan_json
    plan = json.loads(file.read_text())
    del plan["sha256"]
    pairs = {"NCCL_CROSS_NIC": "0", "NCCL_DEBUG": "INFO"}
    settings = [{"name": name, "value": value, "reason": "r", "source": "s"} for name, value in pairs.items()]
    plan["blueprint"]["settings"] = settings
    file.write_text(json.dumps(plan))
    job = slurm.run(
        "sbatch", "--parsable", "run/job.sbatch", cwd=tmp_path, env=environment | {"NCCL_DEBUG": "WARN"}
    ).strip()
    watch.wait_for_step(tmp_path / "run", 3)
    found = [slurm.environment_of(slurm.worker_on(node)) for node in (1, 2)]
    assert [one.get("NCCL_CROSS_NIC") for one in found] == ["0", "0"]
    assert [one.get("NCCL_DEBUG") for one in found] == ["WARN", "WARN"], "what the user has set stays"
    slurm.run("scancel", job)
    slurm.wait(job)


@pytest.mark.slow
def test_a_warned_job_is_requeued_and_loses_no_sample(slurm: Cluster, sbatch, watch, tmp_path: Path) -> None:
    """The signal is the one that Slurm sends ahead of a time limit."""
    run = tmp_path / "runs/warned"
    job = sbatch("run.dir=runs/warned", *LONG)
    watch.wait_for_step(run, 15)
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run)
    assert watch.steps(run) == list(range(1, 121)), "no step twice, none left out"
    assert "start 2 continues" in watch.log(run)


@pytest.mark.slow
def test_a_warned_job_of_replica_groups_is_requeued_and_loses_no_sample(
    slurm: Cluster, sbatch, watch, tmp_path: Path
) -> None:
    run = tmp_path / "runs/groups"
    job = sbatch("run.dir=runs/groups", *LONG, "resilience=elastic", "resilience.replica_groups=2", PATIENT)
    watch.wait_for_step(run, 15)
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run)
    assert watch.steps(run) == list(range(1, 121)), "no step twice, none left out"


@pytest.mark.slow
def test_a_failing_worker_ends_the_job_with_the_runs_code(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    """torchrun makes every code 1, srun takes the greatest; the job has the run's own, and does not come back."""
    run = tmp_path / "runs/failing"
    job = sbatch("run.dir=runs/failing", "train.max_steps=100000")
    watch.wait_for_step(run, 3)
    slurm.worker_on(2).send_signal(signal.SIGSEGV)  # a kill before the first checkpoint would be started again
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "5:0", "0"), watch.log(run)
    assert read_result("runs/failing")["exit_code"] == 5
    assert "rank 1 (" in watch.log(run)
    assert "SIGSEGV" in watch.log(run)


@pytest.mark.slow
def test_kill_9_of_torchrun_on_a_node_starts_the_run_again_in_its_job(
    slurm: Cluster, sbatch, watch, tmp_path: Path
) -> None:
    """Its workers save and end, and with them all others; nobody asked for that."""
    run = tmp_path / "runs/torchrun"
    job = sbatch("run.dir=runs/torchrun", *LONG)
    watch.wait_for_step(run, 15)
    slurm.worker_on(2).parent().kill()
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run)
    assert len(list(RunDir(run).generations.iterdir())) == 2, "on the same hosts, under a new start"
    assert sorted(set(watch.steps(run))) == list(range(1, 121))


@pytest.mark.slow
def test_kill_9_of_the_supervisor_starts_the_run_again_in_its_job(
    slurm: Cluster, sbatch, watch, tmp_path: Path
) -> None:
    run = tmp_path / "runs/supervisor"
    job = sbatch("run.dir=runs/supervisor", *LONG)
    watch.wait_for_step(run, 15)
    psutil.Process(read_json(RunDir(run).pid_json)["pid"]).kill()
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run)
    assert len(list(RunDir(run).generations.iterdir())) == 2, "on the same hosts, under a new start"
    assert sorted(set(watch.steps(run))) == list(range(1, 121))


@pytest.mark.slow
def test_a_cancelled_run_saves_and_goes_on_when_submitted_again(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    run = tmp_path / "runs/cancelled"
    job = sbatch("run.dir=runs/cancelled", *LONG)
    watch.wait_for_step(run, 15)
    slurm.run("scancel", job)
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    stopped = read_result("runs/cancelled")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 6), watch.log(run)
    assert RunDir(run).checkpoint_steps()[-1] == stopped["steps"]
    again = slurm.run("sbatch", "--parsable", run / "job.sbatch")
    assert slurm.wait(again)["ExitCode"] == "0:0", watch.log(run)
    assert watch.steps(run) == list(range(1, 121)), "no step twice, none left out"


@pytest.mark.slow
def test_a_time_limit_saves_and_requeues_until_that_was_often_enough(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    """Slurm itself sends the warning; it counts limits in minutes, and may warn up to one earlier."""
    run = tmp_path / "runs/limit"
    limits = ("cluster.slurm.time='00:02:00'", "cluster.slurm.warn_s=30", "cluster.slurm.max_requeues=1")
    job = sbatch("run.dir=runs/limit", "train.max_steps=1000000", "checkpoint.interval_steps=100000", *limits)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "6:0", "1"), watch.log(run)
    steps = watch.steps(run)
    assert steps == list(range(1, len(steps) + 1)), "no step twice, none left out"
    assert RunDir(run).checkpoint_steps()[-1] == len(steps) == read_result("runs/limit")["steps"]
    assert "not requeued: " in watch.log(run) and "its time limit" in watch.log(run)


@pytest.mark.slow
def test_a_run_that_hangs_starts_again_in_its_place(slurm: Cluster, sbatch, watch, tmp_path: Path) -> None:
    """A worker stands still with its connections open; the others notice by the learned length of a step."""
    run = tmp_path / "runs/hang"
    job = sbatch("run.dir=runs/hang", *LONG, "resilience.hang_floor_s=8")
    watch.wait_for_step(run, 15)
    slurm.worker_on(2).suspend()
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run)
    assert "rank 1 is late" in watch.log(run)
    assert len(list(RunDir(run).generations.iterdir())) == 2, "on the same hosts, under a new start"
    assert sorted(set(watch.steps(run))) == list(range(1, 121))
