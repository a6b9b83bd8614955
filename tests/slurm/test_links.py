"""Hosts whose cables lose packets or are narrow: a run is slower and the same, and the doctor names the cable."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from lab.cluster import Cluster

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

STEPS = 40


@pytest.fixture
def slurm(cabled: Cluster) -> Cluster:
    return cabled


def losses_of(run: Path) -> list[tuple[int, float]]:
    return [(e["step"], e["loss"]) for e in read_events(RunDir(run).events(0)) if e["type"] == "step"]


@pytest.mark.slow
def test_bad_links_cost_time_and_nothing_else(
    slurm: Cluster, sbatch, watch, tmp_path: Path, read_result, record_property
) -> None:
    """Narrow, with packets lost, and cut for three seconds: TCP sends again, and the run waits."""
    hosts = slurm.hosts
    assert hosts is not None

    def finish(run: str, job: str) -> None:
        ended = slurm.wait(job)
        stood = (ended["JobState"], ended["NodeList"], ended["Restarts"])
        assert stood == ("COMPLETED", "node[1-2]", "0"), watch.log(tmp_path / "runs" / run)
        record_property(f"{run}_s", read_result(f"runs/{run}")["time_s"])

    finish("whole", sbatch("run.dir=runs/whole", f"train.max_steps={STEPS}"))
    hosts.limit_rate(2, "50mbit")
    for number in (1, 2):
        hosts.lose(number, percent=3)
    job = sbatch("run.dir=runs/bad", f"train.max_steps={STEPS}", "run.node_timeout_s=30")
    watch.wait_for_step(tmp_path / "runs/bad", 5)
    hosts.cut(2)
    time.sleep(3)
    hosts.heal(2)
    finish("bad", job)
    assert all(hosts.lost_packets(number) > 100 for number in (1, 2))
    whole, bad = (losses_of(tmp_path / "runs" / run) for run in ("whole", "bad"))
    assert [step for step, _ in whole] == list(range(1, STEPS + 1))
    assert bad == whole
    assert read_result("runs/bad")["weights_sha256"] == read_result("runs/whole")["weights_sha256"]


@pytest.mark.slow
def test_the_doctor_names_the_host_with_a_narrow_cable(slurm: Cluster, doctor, tmp_path: Path) -> None:
    assert slurm.hosts is not None
    slurm.hosts.limit_rate(3, "100mbit")
    _, diagnosis = doctor(nodes=3)
    pairs = diagnosis["links"]["pairs"]
    assert [pair["hosts"] for pair in pairs] == [["node1", "node2"], ["node1", "node3"], ["node2", "node3"]]
    assert all(len(pair["sizes"]) > 1 for pair in pairs)
    (slow,) = [check for check in diagnosis["between"] if check["name"] == "slow link"]
    assert "node3" in slow["found"], json.dumps(diagnosis["between"], indent=2)
