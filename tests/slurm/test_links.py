"""Hosts whose cables lose packets or are narrow: a run is slower and the same, and the doctor names the cable."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab.cluster import Cluster

from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir


@pytest.fixture
def slurm(cabled: Cluster) -> Cluster:
    return cabled


def losses_of(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read_events(RunDir(run).events(0)) if e["type"] == "step"]


@pytest.mark.slow
def test_a_run_over_a_narrow_link_that_loses_packets_has_the_same_losses(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result
) -> None:
    assert slurm.hosts is not None

    def train(run: str) -> None:
        ended = slurm.wait(sbatch(f"run.dir=runs/{run}"), timeout_s=240)
        assert (ended["JobState"], ended["NodeList"]) == ("COMPLETED", "node[1-2]"), watch.log(tmp_path / "runs" / run)

    train("whole")
    slurm.hosts.limit_rate(2, "50mbit")
    for number in (1, 2):
        slurm.hosts.lose(number, percent=3)
    train("lossy")
    assert all(slurm.hosts.lost_packets(number) > 100 for number in (1, 2))
    whole, lossy = (losses_of(tmp_path / "runs" / run) for run in ("whole", "lossy"))
    assert len(whole) == 20
    assert lossy == whole
    assert read_result("runs/lossy")["weights_sha256"] == read_result("runs/whole")["weights_sha256"]


@pytest.mark.slow
def test_the_doctor_names_the_host_with_a_narrow_cable(slurm: Cluster, doctor, tmp_path: Path) -> None:
    assert slurm.hosts is not None
    slurm.hosts.limit_rate(3, "100mbit")
    _, diagnosis = doctor(nodes=3)
    pairs = diagnosis["links"]["pairs"]
    assert [pair["hosts"] for pair in pairs] == [["node1", "node2"], ["node1", "node3"], ["node2", "node3"]]
    assert all(len(pair["sizes"]) > 1 for pair in pairs)
    (slow,) = [check for check in diagnosis["between"] if check["name"] == "slow link"]
    assert slow["found"].startswith("node3 reaches nobody at more than "), json.dumps(diagnosis["between"], indent=2)
