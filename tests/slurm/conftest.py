"""A Slurm of two nodes for the quick tests, with runs of a stand-in's size; skipped where there can be none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import cluster as lab_cluster
from lab.cluster import Cluster

HOME = Path(__file__).parents[2]
SMALL = (
    *("recipe=tiny", "cluster.num_nodes=2", "cluster.devices_per_node=1"),
    *("cluster.slurm.exclusive=false", "cluster.slurm.cpus_per_task=1", "cluster.slurm.mem=100M"),
    *("run.preflight=false", "run.node_timeout_s=5"),
    *("data.seq_len=16", "batching.global_batch_size=4", "train.log_interval_steps=20"),
)
"""Two hosts of one process, on a part of their cores."""


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One cache of prepared text for all runs of the session."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return os.environ | {"TRAINSPEC_CACHE": cache, "PYTHONPATH": str(HOME), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if why := lab_cluster.lacking():
        pytest.skip(why)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), nodes=2)
    yield cluster
    cluster.stop()


@pytest.fixture
def slurm(two_nodes: Cluster) -> Iterator[Cluster]:
    """With no jobs, and all nodes idle, before and after."""
    two_nodes.reset()
    yield two_nodes
    two_nodes.reset()


Sbatch = Callable[..., str]


@pytest.fixture
def sbatch(slurm: Cluster, environment: dict[str, str], tmp_path: Path) -> Sbatch:
    """Submits `trainspec sbatch SMALL ARGUMENTS` from an empty folder; -> the job's number."""

    def submit(*arguments: str, base: tuple[str, ...] = SMALL) -> str:
        given = {argument.partition("=")[0] for argument in arguments}
        kept = [argument for argument in base if argument.partition("=")[0] not in given]
        program = [*slurm.beside_controller, sys.executable, "-m", "trainspec_cli"]
        command = [*program, "sbatch", *kept, *arguments, "--submit", "--json"]
        env = slurm.environment | environment
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return str(json.loads(done.stdout)["job_id"])

    return submit


@pytest.fixture
def read_result(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    return lambda run: json.loads((tmp_path / run / "result.json").read_text())
