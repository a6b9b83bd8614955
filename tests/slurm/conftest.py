"""A Slurm of two nodes, one of three hosts with cables, and small runs; skipped where Slurm is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import cluster as lab_cluster
from lab import hosts as lab_hosts
from lab.cluster import Cluster
from lab.hosts import Hosts

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

HOME = Path(__file__).parents[2]
SMALL = (
    *("recipe=tiny", "cluster.num_nodes=2", "cluster.devices_per_node=1"),
    *("cluster.slurm.exclusive=false", "cluster.slurm.cpus_per_task=1", "cluster.slurm.mem=100M"),
    *("run.preflight=false", "run.node_timeout_s=5"),
    *("data.seq_len=16", "batching.global_batch_size=4", "train.log_interval_steps=20"),
)
"""Two hosts of one process, on a part of their cores."""


@pytest.fixture(scope="session")
def environment(measured_cache: Path) -> dict[str, str]:
    return os.environ | {"TRAINSPEC_CACHE": str(measured_cache), "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def two_nodes() -> Iterator[Cluster]:
    if why := lab_cluster.lacking():
        pytest.skip(why)
    with open_folder() as folder:
        cluster = Cluster(folder, nodes=2, slurmd_timeout_s=120)  # none is lost, and one is made slow
        yield cluster
        assert cluster.stop() == [], "nothing is left of the jobs"


@pytest.fixture(scope="session")
def three_hosts() -> Iterator[Cluster]:
    """Three hosts in network namespaces. A run takes two, so that one is left when one is lost."""
    if why := lab_cluster.lacking() or lab_hosts.lacking():
        pytest.skip(why)
    hosts = Hosts(3)
    with open_folder() as folder:
        cluster = Cluster(folder, nodes=3, hosts=hosts)
        yield cluster
        left = cluster.stop()
    assert (left, hosts.remove(), lab_hosts.namespaces()) == ([], [], []), "nothing is left of the jobs and the hosts"


@pytest.fixture
def cabled(three_hosts: Cluster) -> Iterator[Cluster]:
    """`three_hosts` with whole cables, no jobs, and all nodes idle, before and after."""
    make_good(three_hosts)
    yield three_hosts
    make_good(three_hosts)


def make_good(cluster: Cluster) -> None:
    assert cluster.hosts is not None
    for number in cluster.hosts.numbers:
        cluster.hosts.make_good(number)
    cluster.reset()


@contextmanager
def open_folder() -> Iterator[Path]:
    """One that every user may enter, which pytest's own are not."""
    with tempfile.TemporaryDirectory(prefix="trainspec-slurm-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(scope="session")
def make_open_folder() -> Callable[[], AbstractContextManager[Path]]:
    return open_folder


@pytest.fixture
def slurm(two_nodes: Cluster) -> Iterator[Cluster]:
    """With no jobs, and all nodes idle, before and after."""
    two_nodes.reset()
    yield two_nodes
    two_nodes.reset()


def steps_of(run: Path) -> list[int]:
    return [event["step"] for event in read_events(RunDir(run).events(0)) if event["type"] == "step"]


class Watch:
    """A run on a cluster, as its user sees it."""

    def __init__(self, slurm: Cluster):
        self._slurm = slurm

    def steps(self, run: Path) -> list[int]:
        return steps_of(run)

    def log(self, run: Path) -> str:
        return "".join(log.read_text() for log in sorted((run / "logs").glob("slurm-*.log")))

    def wait_for_step(self, run: Path, step: int) -> None:
        self._slurm.wait_until(lambda: max(steps_of(run), default=0) >= step, f"step {step}")

    def next_step_after(self, run: Path, moment: float) -> float:
        """Seconds from `moment` to the first step of a later start."""
        found: list[float] = []

        def look() -> bool:
            events = list(read_events(RunDir(run).events(0)))
            starts = [event["time"] for event in events if event["type"] == "start" and event["time"] > moment]
            steps = [event["time"] for event in events if event["type"] == "step" and starts[:1] < [event["time"]]]
            found[:] = [steps[0] - moment] if starts and steps else []
            return bool(found)

        self._slurm.wait_until(look, "a step of the next start")
        return found[0]


@pytest.fixture
def watch(slurm: Cluster) -> Watch:
    return Watch(slurm)


Sbatch = Callable[..., str]


@pytest.fixture
def write_script(slurm: Cluster, environment: dict[str, str], tmp_path: Path) -> Callable[..., None]:
    """Writes the run and the script of `trainspec sbatch SMALL ARGUMENTS`, and submits nothing."""

    def write(*arguments: str) -> None:
        command = [*slurm.beside_controller, sys.executable, "-m", "trainspec_cli", "sbatch", *SMALL, *arguments]
        subprocess.run(command, cwd=tmp_path, env=slurm.environment | environment, check=True, capture_output=True)

    return write


@pytest.fixture
def sbatch(slurm: Cluster, environment: dict[str, str], tmp_path: Path) -> Sbatch:
    """Submits `trainspec sbatch SMALL --submit ARGUMENTS` from an empty folder; -> the job's number."""

    def submit(*arguments: str, base: tuple[str, ...] = SMALL) -> str:
        given = {argument.partition("=")[0] for argument in arguments}
        kept = [argument for argument in base if argument.partition("=")[0] not in given]
        program = [*slurm.beside_controller, sys.executable, "-m", "trainspec_cli"]
        command = [*program, "sbatch", *kept, "--submit", "--json", *arguments]
        env = slurm.environment | environment
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["job_id"])

    return submit


@pytest.fixture
def doctor(slurm: Cluster, environment: dict[str, str], tmp_path: Path) -> Callable[[int], tuple[str, dict[str, Any]]]:
    """Has a job's hosts examined; -> (the job's exit code, the diagnosis)"""

    def examine(nodes: int) -> tuple[str, dict[str, Any]]:
        command = f"{sys.executable} -m trainspec_cli doctor cluster.device=cpu cluster.devices_per_node=1 --json"
        asked = (f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=100M", "--output=doctor.json")
        job = slurm.run("sbatch", "--parsable", *asked, "--wrap", command, cwd=tmp_path, env=environment)
        ended = slurm.wait(job)
        said = (tmp_path / "doctor.json").read_text()
        assert "{" in said, said
        return ended["ExitCode"], json.loads(said[said.index("{") :])

    return examine


@pytest.fixture
def read_result(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda run: json.loads((tmp_path / run / "result.json").read_text())
