"""sbatch without a Slurm: what it writes, and what it refuses."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from lab.commands import Command, call
from lab.problems import codes

from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_plan

TWO = ("recipe=tiny", "data.max_bytes=200000", "cluster.num_nodes=2")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def trainspec(tmp_path: Path, cache: Path) -> Command:
    """With those programs that the test puts into `programs`."""
    path = f"{tmp_path / 'programs'}:/no/slurm/here"
    return partial(call, folder=tmp_path, TRAINSPEC_CACHE=str(cache), PATH=path)


@pytest.fixture
def sbatch(trainspec: Command) -> Command:
    return partial(trainspec, "sbatch")


def test_the_script_is_printed_and_the_run_is_on_paper(sbatch: Command, tmp_path: Path) -> None:
    done = sbatch(*TWO, "run.dir=runs/mine", "cluster.slurm.partition=gpu")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs/mine"
    assert done.stdout == (run / "job.sbatch").read_text()
    assert done.stdout.startswith("#!/bin/bash\n")
    assert "#SBATCH --partition=gpu\n" in done.stdout
    assert (run / "logs").is_dir(), "Slurm writes no log into a folder that is not there"
    plan = read_plan(RunDir(run))
    assert (plan.num_nodes, plan.devices_per_node, plan.world_size) == (2, 2, 4)
    assert (run / "run.json").is_file()


@pytest.mark.slow
def test_a_sweep_makes_a_run_a_point_and_one_array(sbatch: Command, tmp_path: Path) -> None:
    done = sbatch(*TWO, "--sweep", "optim.lr=0.1,0.2", "--sweep", "train.seed=1,2", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    plans = [json.loads((Path(run) / "plan.json").read_text())["spec"] for run in told["runs"]]
    points = [(plan["optim"]["lr"], plan["train"]["seed"]) for plan in plans]
    assert points == [(0.1, 1), (0.1, 2), (0.2, 1), (0.2, 2)]
    script = Path(told["script"]).read_text()
    assert "#SBATCH --array=0-3\n" in script
    assert all(run in script for run in told["runs"])
    assert all((Path(run) / "job.sbatch").is_file() for run in told["runs"]), "each can go on by itself"


def test_gpus_of_hosts_that_are_elsewhere_are_planned_for(sbatch: Command) -> None:
    done = sbatch(*TWO, "cluster=h100", "batching.global_batch_size=16", "run.dir=run")
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --gpus-per-node=8\n" in done.stdout


def test_what_only_the_hosts_could_tell_is_asked_for(sbatch: Command, tmp_path: Path) -> None:
    refused = sbatch(*TWO, "cluster=auto")
    assert refused.returncode == 2
    assert "`cluster.device` is auto" in refused.stderr
    assert "`cluster.devices_per_node`" in refused.stderr
    assert not (tmp_path / "runs").exists()


def test_a_host_without_slurm_says_so(sbatch: Command) -> None:
    refused = sbatch(*TWO, "run.dir=run", "--submit", "--json")
    assert (refused.returncode, codes(refused.stdout)) == (4, [("no_slurm", "")])


def test_runs_tells_what_is_made_and_what_waits_in_the_queue(
    trainspec: Command, sbatch: Command, tmp_path: Path
) -> None:
    """Nobody knows of a job that was not submitted; of others Slurm says whether they wait."""
    for program, says in (("sbatch", "41"), ("squeue", "41_1")):
        file = tmp_path / "programs" / program
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {says}\n")
        file.chmod(0o755)
    assert sbatch(*TWO, "run.dir=runs/printed").returncode == 0
    submitted = sbatch(*TWO, "--sweep", "optim.lr=0.1,0.2", "--submit", "--json")
    assert submitted.returncode == 0, submitted.stderr
    first, second = (Path(run).name for run in json.loads(submitted.stdout)["runs"])
    listed = {Path(line["path"]).name: line["status"] for line in json.loads(trainspec("runs", "--json").stdout)}
    assert listed == {"printed": "made", first: "made", second: "queued"}
    report = trainspec("report", f"runs/tiny/{second}")
    assert report.returncode == 0, report.stderr
    assert "queued, 0 of 20 steps" in report.stdout
