"""A sweep as an array, of jobs that share a node and its GPUs; and jobs of a user who is not root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from lab.cluster import Cluster

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

USER = 65534
"""nobody"""


def workers(slurm: Cluster, job: str) -> list[tuple[int, dict[str, str]]]:
    """The ranks and environments of a job's workers."""
    everywhere = [process for node in (1, 2) for process in slurm.processes_of(node)]
    found = [(rank, slurm.environment_of(process)) for process in everywhere if (rank := rank_of(process)) is not None]
    return [(rank, e) for rank, e in found if job in (e.get("SLURM_JOB_ID"), e.get("SLURM_ARRAY_JOB_ID"))]


@pytest.mark.slow
def test_a_sweep_trains_every_point_on_gpus_of_its_own(slurm: Cluster, sbatch, watch, tmp_path: Path) -> None:
    """The lab's GPUs are /dev/null: the runs are on the CPU, and the numbers are what Slurm gave them."""
    gpus = ("cluster.num_nodes=1", "cluster.slurm.gpus_per_node='1'", "train.max_steps=300")
    job = sbatch(*gpus, "--sweep", "optim.lr=0.001,0.002,0.004")
    seen: dict[str, tuple[str, str, int]] = {}

    def all_seen() -> bool:
        for rank, e in workers(slurm, job):
            seen[e["SLURM_ARRAY_TASK_ID"]] = (e["SLURMD_NODENAME"], e["CUDA_VISIBLE_DEVICES"], rank)
        return len(seen) == 3

    slurm.wait_until(all_seen, "workers of three runs")
    assert len({(node, gpu) for node, gpu, _ in seen.values()}) == 3, "none shares a GPU with another"
    assert {gpu for _, gpu, _ in seen.values()} <= {"0", "1"}
    assert {rank for *_, rank in seen.values()} == {0}, "devices are counted among those given"
    slurm.wait_until(lambda: not slurm.run("squeue", "--noheader"), "the array to end")
    runs = sorted((tmp_path / "runs/tiny").glob("2*"))
    assert [json.loads((run / "result.json").read_text())["exit_code"] for run in runs] == [0, 0, 0]
    peaks = [max(e["lr"] for e in read_events(RunDir(run).events(0)) if e["type"] == "step") for run in runs]
    assert peaks == pytest.approx([0.001, 0.002, 0.004])


@pytest.fixture
def own_folder(make_open_folder) -> Path:
    with make_open_folder() as folder:
        os.chown(folder, USER, USER)
        yield folder


@pytest.fixture
def as_user() -> list[str]:
    """What goes before a command."""
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv (apt-get install util-linux)")
    # setpriv itself may still enter root's folders when it starts a program; a shell between them may not.
    shell = ["sh", "-c", 'exec "$0" "$@"']
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--", *shell]


@pytest.fixture
def open_python(as_user: list[str], environment: dict[str, str], own_folder: Path) -> tuple[str, dict[str, str]]:
    """One that the user may run, with the packages of this one, and its environment: root's own may lie in its home."""
    packages = {"PYTHONPATH": os.pathsep.join((environment["PYTHONPATH"], sysconfig.get_path("purelib")))}
    the_systems = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    for python, more in ((sys.executable, {}), (the_systems, packages)):
        own = {"HOME": str(own_folder), "TRAINSPEC_CACHE": str(own_folder / "cache"), "USER": "nobody", **more}
        imports = [*as_user, python, "-c", "import trainspec_cli, torch"]
        if not subprocess.run(imports, env=environment | own, cwd=own_folder, capture_output=True).returncode:
            return python, environment | own
    pytest.skip(f"neither {sys.executable} nor {the_systems} is open to other users")


@pytest.mark.slow
def test_a_user_who_is_not_root_trains(slurm: Cluster, as_user: list[str], open_python, own_folder: Path) -> None:
    python, own = open_python
    small = ("recipe=tiny", "cluster.num_nodes=2", "cluster.devices_per_node=1", "data.seq_len=16")
    few = ("cluster.slurm.exclusive=false", "cluster.slurm.cpus_per_task=1", "cluster.slurm.mem=100M")
    command = [python, "-m", "trainspec_cli", "sbatch", *small, *few, "run.preflight=false", "run.dir=run", "--submit"]
    done = subprocess.run(
        [*as_user, *command], env=slurm.environment | own, cwd=own_folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    ended = slurm.wait(done.stdout.strip())
    said = "".join(log.read_text() for log in (own_folder / "run/logs").glob("slurm-*.log"))
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), said
    made = [own_folder / "run", *(own_folder / "run").rglob("*")]
    assert {path.stat().st_uid for path in made} == {USER}
    assert {path for path in made if path.stat().st_mode & 0o077} == set(), "on every host"
