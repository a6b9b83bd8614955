"""Runs on two real nodes in containers: Apptainer's command line, obeyed by a stand-in with mounts of its own."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from lab.cluster import Cluster

from trainspec_cli.run.folder.paths import RunDir

LONG = ("train.max_steps=120", "checkpoint.interval_steps=10", "fault=slow(step=15,seconds=0.3,steps=20)")
STANDIN = Path(__file__).with_name("standin_apptainer.py")


@pytest.fixture
def contained(tmp_path: Path) -> list[str]:
    """Arguments for a run in a container, whose Python is this one's by its full path."""
    program, image = tmp_path / "programs" / "apptainer", tmp_path / "torch.sif"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {STANDIN} "$@"\n')
    program.chmod(0o755)
    image.touch()
    setup = f"export PATH={program.parent}:$PATH GREETING=outside"
    return [
        *("cluster.slurm.container_runtime=apptainer", f"cluster.slurm.container_image={image}"),
        *(f"cluster.slurm.container_python={sys.executable}", "cluster.slurm.container_env=[GREETING]"),
        f"cluster.slurm.setup=['{setup}']",
    ]


@pytest.mark.slow
def test_a_run_in_a_container_hears_the_warning_and_is_requeued(
    slurm: Cluster, sbatch, watch, tmp_path: Path, contained: list[str]
) -> None:
    run = tmp_path / "runs/contained"
    job = sbatch("run.dir=runs/contained", *LONG, *contained)
    watch.wait_for_step(run, 15)
    inside = slurm.environment_of(slurm.worker_on(2).parent())
    assert inside["APPTAINER_CONTAINER"] == str(tmp_path / "torch.sif")
    assert (inside["GREETING"], inside["PYTHONPATH"].split(":")[0]) == ("outside", "/opt/trainspec")
    slurm.run("scancel", "--batch", "--signal=USR2", job)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run)
    assert watch.steps(run) == list(range(1, 121)), "no step twice, none left out"


@pytest.mark.slow
def test_a_worker_that_fails_in_a_container_ends_the_job_with_the_runs_code(
    slurm: Cluster, sbatch, watch, tmp_path: Path, contained: list[str]
) -> None:
    run = tmp_path / "runs/failing"
    job = sbatch("run.dir=runs/failing", "train.max_steps=100000", *contained)
    watch.wait_for_step(run, 3)
    slurm.worker_on(2).send_signal(signal.SIGSEGV)  # a kill before the first checkpoint would be started again
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "5:0"), watch.log(run)
    assert "SIGSEGV" in watch.log(run)


@pytest.mark.slow
def test_an_image_that_is_not_there_ends_the_job_and_is_named(
    slurm: Cluster, sbatch, watch, tmp_path: Path, contained: list[str]
) -> None:
    run = tmp_path / "runs/without"
    (tmp_path / "torch.sif").unlink()
    ended = slurm.wait(sbatch("run.dir=runs/without", *contained))
    assert ended["JobState"] == "FAILED" and ended["ExitCode"] != "0:0", watch.log(run)
    assert "open image" in watch.log(run)
    assert "exit code 1 before" in watch.log(run)
    assert RunDir(run).checkpoint_steps() == []


@pytest.mark.slow
def test_slurm_grants_gpus_that_are_asked_for_by_gres(slurm: Cluster, sbatch, watch, tmp_path: Path) -> None:
    asked = ("cluster.slurm.gpus_per_node='2'", "cluster.slurm.gpu_request=gres", "cluster.slurm.time='1:00:00'")
    ended = slurm.wait(sbatch("run.dir=runs/gres", "train.max_steps=2", *asked))
    assert ended["ExitCode"] == "0:0", watch.log(tmp_path / "runs/gres")
    assert ended["TresPerNode"].endswith("gpu:2") and ended["TimeLimit"] == "01:00:00", ended
