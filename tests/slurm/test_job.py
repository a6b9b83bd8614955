"""Runs on a real Slurm: submitted, waited for, stopped, requeued and resumed."""

from __future__ import annotations

from pathlib import Path

from lab.cluster import Cluster

from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir


def steps_of(run: Path) -> list[int]:
    return [event["step"] for event in read_events(RunDir(run).events(0)) if event["type"] == "step"]


def log_of(run: Path) -> str:
    return "".join(log.read_text() for log in sorted((run / "logs").glob("slurm-*.log")))


def test_a_run_on_two_nodes_ends_with_its_own_exit_code(slurm: Cluster, sbatch, tmp_path: Path, read_result) -> None:
    job = sbatch("run.dir=runs/done")
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), log_of(tmp_path / "runs/done")
    assert steps_of(tmp_path / "runs/done") == list(range(1, 21))
    assert read_result("runs/done")["status"] == "done"
    starts = [next(read_events(RunDir(tmp_path / "runs/done").events(rank))) for rank in (0, 1)]
    assert [start["world_size"] for start in starts] == [2, 2]


def wait_for_step(slurm: Cluster, run: Path, step: int) -> None:
    slurm.wait_until(lambda: max(steps_of(run), default=0) >= step, f"step {step}")


LONG = ("train.max_steps=120", "checkpoint.interval_steps=10")


def test_a_cancelled_run_saves_and_goes_on_when_submitted_again(
    slurm: Cluster, sbatch, tmp_path: Path, read_result
) -> None:
    run = tmp_path / "runs/cancelled"
    job = sbatch("run.dir=runs/cancelled", *LONG)
    wait_for_step(slurm, run, 15)
    slurm.run("scancel", job)
    assert slurm.wait(job)["JobState"] == "CANCELLED"
    stopped = read_result("runs/cancelled")
    assert (stopped["status"], stopped["exit_code"]) == ("stopped", 6), log_of(run)
    assert RunDir(run).checkpoint_steps()[-1] == stopped["steps"]
    again = slurm.run("sbatch", "--parsable", run / "job.sbatch")
    assert slurm.wait(again)["ExitCode"] == "0:0", log_of(run)
    assert steps_of(run) == list(range(1, 121)), "no step twice, none left out"


def test_a_warned_job_is_requeued_and_loses_no_sample(slurm: Cluster, sbatch, tmp_path: Path, read_result) -> None:
    run = tmp_path / "runs/warned"
    job = sbatch("run.dir=runs/warned", *LONG)
    wait_for_step(slurm, run, 15)
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), log_of(run)
    assert steps_of(run) == list(range(1, 121)), "no step twice, none left out"
    assert "start 2 goes on" in log_of(run)
