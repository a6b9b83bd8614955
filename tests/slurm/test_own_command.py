"""A user-defined command on a real Slurm of two nodes: submitted by trainspec, and in the user's script."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab.cluster import Cluster

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

DDP = Path(__file__).parents[1] / "lab" / "own_commands" / "ddp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(DDP))
ASKED = (
    "cluster.slurm.exclusive=false",
    "cluster.num_nodes=2",
    "cluster.device=cpu",
    "cluster.slurm.cpus_per_task=1",
    "cluster.slurm.mem=100M",
)
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --mem=100M --output=own.log --open-mode=append --requeue
srun {python} -m trainspec_cli run --max-restarts 1 -- {command}
"""


def steps_of_both(run: Path) -> list[list[int]]:
    """The steps of each rank."""
    events = [read_events(RunDir(run).events(rank)) for rank in (0, 1)]
    return [[event["step"] for event in of_rank if event["type"] == "step"] for of_rank in events]


@pytest.mark.slow
def test_a_preempted_command_goes_on_from_its_own_checkpoint_on_both_nodes(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    """It saves each step, so that at most one step is repeated."""
    run = tmp_path / "own"
    job = sbatch("--dir", "own", "--grace-s", "5", "--", *TORCHRUN, "60", "0.1", base=ASKED)
    watch.wait_for_step(run, 10)
    urgent = slurm.run(
        "sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", "--wrap", "true", cwd=tmp_path
    )
    assert slurm.wait(urgent)["JobState"] == "COMPLETED"
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run)
    assert "preempted; start 2 " in watch.log(run)
    assert (read_result("own")["status"], read_result("own")["steps"]) == ("done", 60)
    for steps in steps_of_both(run):
        assert sorted(set(steps)) == list(range(1, 61)) and len(steps) <= 61, "one step, at most, was made twice"
    logs = [f"launch_0{start}/node0000{node}" for start in (1, 2) for node in (0, 1)]
    assert [str(log.parent.relative_to(run / "logs")) for log in sorted(run.glob("logs/*/*/output.log"))] == logs


@pytest.mark.slow
def test_srun_in_ones_own_script_gives_nodes_and_a_warned_run_goes_on(
    slurm: Cluster, watch, tmp_path: Path, environment: dict[str, str]
) -> None:
    """The signal is the one that `#SBATCH --signal=USR2@60` sends to all processes of the step. A killed rank has used
    up the budget of restarts before: the next one ends the job, though Slurm has started that again."""
    (tmp_path / "own.sbatch").write_text(
        SCRIPT.format(python=sys.executable, command=" ".join([*TORCHRUN, "4000", "0.1"]))
    )
    job = slurm.run("sbatch", "--parsable", "own.sbatch", cwd=tmp_path, env=environment)
    run = tmp_path / "runs" / "ddp.py" / f"slurm-{job}.0"
    log = tmp_path / "own.log"
    watch.wait_for_step(run, 10)
    slurm.worker_on(2).kill()
    slurm.wait_until(lambda: "the last restart" in log.read_text(), "the start after a failure")
    slurm.wait_until(lambda: len(starts_of(run)) == 2, "the second start's steps")
    slurm.run("scancel", "--signal=USR2", job)
    slurm.wait_until(lambda: len(starts_of(run)) == 3, "the third start's steps")
    assert "its time limit" in log.read_text()
    slurm.worker_on(2).kill()
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("FAILED", "5:0", "1"), log.read_text()
    assert f"Slurm job {job}: " in log.read_text() and "node 1 of 2" in log.read_text()
    result = json.loads((run / "result.json").read_text())
    assert (result["status"], len(result["recoveries"])) == ("failed", 1), log.read_text()
    assert all(set(steps) == set(range(1, max(steps) + 1)) for steps in steps_of_both(run)), "no node is left out"


def starts_of(run: Path) -> list[int]:
    """The step after which each start has made its first."""
    found, before = [], None
    for event in read_events(RunDir(run).events(0)):
        if event["type"] == "start":
            before = event["step"]
        elif event["type"] == "step" and before is not None:
            found.append(before)
            before = None
    return found
