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
