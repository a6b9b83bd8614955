"""A Slurm that knows its switches: ranks of one leaf run on nodes of one leaf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import cluster as lab_cluster
from lab.cluster import Cluster

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.paths import RunDir

SWITCHES = (
    "SwitchName=leaf1 Nodes=node[1,3]",
    "SwitchName=leaf2 Nodes=node2",
    "SwitchName=top Switches=leaf[1-2]",
)
SLOW = ("train.max_steps=50", "fault=slow(step=15,seconds=0.3,steps=30)")
"""Where the test looks for its workers."""
TIERS = "cluster.fabric.tiers=[{name: domain},{name: leaf,devices: 2},{name: spine}]"


@pytest.fixture(scope="module")
def slurm(make_open_folder) -> Iterator[Cluster]:
    if why := lab_cluster.lacking():
        pytest.skip(why)
    with make_open_folder() as folder:
        cluster = Cluster(folder, nodes=3, slurmd_timeout_s=120, switches=SWITCHES)
        yield cluster
        assert cluster.stop() == [], "nothing is left of the job"


@pytest.mark.slow
def test_ranks_follow_the_switches(slurm: Cluster, sbatch, watch, tmp_path: Path, read_result) -> None:
    run = RunDir(tmp_path / "runs/placed")
    job = sbatch("run.dir=runs/placed", "cluster.num_nodes=3", TIERS, *SLOW)
    watch.wait_for_step(run.root, 15)
    assert [rank_of(slurm.worker_on(node)) for node in (1, 2, 3)] == [0, 2, 1]
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), watch.log(run.root)
    assert read_result("runs/placed")["status"] == "done"
    assert run.hosts_txt.read_text().split() == ["node1", "node3", "node2"]
