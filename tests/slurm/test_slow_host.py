"""One of two hosts gets a seventh of a core: the doctor names it, and the preflight refuses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import cluster as lab_cluster
from lab.cluster import Cluster
from lab.quota import Quota, lacking


@pytest.fixture
def slow_node(slurm: Cluster) -> Iterator[str]:
    """node2: what its daemon starts is slow."""
    if why := lab_cluster.lacking() or lacking():
        pytest.skip(why)
    quota = Quota(percent=6)  # less than what a busy machine leaves to the other node
    quota.hold(slurm.daemon_of(2))
    yield "node2"
    quota.remove()


@pytest.mark.slow
def test_a_slow_host_is_refused_before_the_workers_start(
    slurm: Cluster, sbatch, watch, slow_node: str, tmp_path: Path
) -> None:
    ended = slurm.wait(sbatch("run.dir=runs/slow", "run.preflight=true"))
    said = watch.log(tmp_path / "runs/slow")
    assert (ended["JobState"], ended["ExitCode"]) == ("FAILED", "4:0"), said
    # On a busy machine, the measurement does not even end in time.
    assert f"{slow_node} is slowest" in said or f"{slow_node} fails the check" in said
    assert watch.steps(tmp_path / "runs/slow") == []


@pytest.mark.slow
def test_the_doctor_names_the_slow_host(slow_node: str, doctor) -> None:
    code, diagnosis = doctor(nodes=2)
    assert code == "4:0", json.dumps(diagnosis, indent=2)
    assert [host["host"] for host in diagnosis["hosts"]] == ["node1", "node2"]
    assert (diagnosis["status"], diagnosis["slowest"]) == ("fail", slow_node)
    assert [pair["hosts"] for pair in diagnosis["links"]["pairs"]] == [["node1", "node2"]]
