"""A Slurm that knows its switches: ranks of one leaf run on nodes of one leaf."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import cluster as lab_cluster
from lab.cluster import Cluster

from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir

SWITCHES = (
    "SwitchName=leaf1 Nodes=node[1,3]",
    "SwitchName=leaf2 Nodes=node2",
    "SwitchName=top Switches=leaf[1-2]",
)
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
    job = sbatch("run.dir=runs/placed", "cluster.num_nodes=3", TIERS)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), watch.log(run.root)
    assert read_result("runs/placed")["status"] == "done"
    assert run.hosts_txt.read_text().split() == ["node1", "node3", "node2"]
    starts = [next(read_events(run.events(rank))) for rank in range(3)]
    assert [start["host"] for start in starts] == ["node1", "node3", "node2"]
