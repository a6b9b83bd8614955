"""A job of a partition with priority takes the nodes: the run saves, is requeued, and continues once they are free."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.cluster import Cluster

STEPS = 120


@pytest.mark.slow
def test_a_preempted_run_saves_is_requeued_and_loses_no_sample(slurm: Cluster, sbatch, watch, tmp_path: Path) -> None:
    """The run itself saves only at its end, so it continues from the checkpoint of the grace time."""
    run = tmp_path / "runs/preempted"
    slow = "fault=slow(step=15,seconds=0.3,steps=20)"
    job = sbatch("run.dir=runs/preempted", f"train.max_steps={STEPS}", slow)
    watch.wait_for_step(run, 15)
    asked = ("--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "sleep 1")
    urgent = slurm.run("sbatch", "--parsable", *asked, cwd=tmp_path)
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run)
    assert watch.steps(run) == list(range(1, STEPS + 1)), "no step twice, none left out"
    assert "it was preempted" in watch.log(run)
