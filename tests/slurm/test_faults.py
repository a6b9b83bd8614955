"""Hosts with cables, in network namespaces: one is powered off, cut off, or returns when the run is elsewhere."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from lab.cluster import Cluster
from lab.groups import changes, check_nothing_was_lost, run_events

from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.paths import RunDir

STEPS = 240
ELASTIC_STEPS = 400
ELASTIC = (
    *("resilience=elastic", "resilience.replica_groups=2", "resilience.exchange_timeout_s=5"),
    *("resilience.heartbeat_timeout_s=3", "run.node_timeout_s=8"),
    *(f"train.max_steps={ELASTIC_STEPS}", "fault=slow(group=0,step=0,seconds=0.1,steps=10000)"),
)
"""Slow enough that Slurm learns of a lost node while the run lasts."""
LONG = (f"train.max_steps={STEPS}", "checkpoint.interval_steps=10")


@pytest.fixture
def slurm(cabled: Cluster) -> Cluster:
    return cabled


@pytest.mark.slow
def test_a_node_that_is_powered_off_is_replaced(slurm: Cluster, sbatch, watch, tmp_path: Path, record_property) -> None:
    run = tmp_path / "runs/power"
    job = sbatch("run.dir=runs/power", *LONG)
    watch.wait_for_step(run, 15)
    moment = time.time()
    slurm.power_off(2)
    record_property("death_to_next_step_s", watch.next_step_after(run, moment))
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), watch.log(run)
    assert ended["NodeList"] == "node[1,3]"
    assert sorted(set(watch.steps(run))) == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_run_whose_cable_is_cut_goes_on_elsewhere_and_the_old_worker_is_fenced(
    slurm: Cluster, sbatch, watch, tmp_path: Path, record_property
) -> None:
    """Node 1 is cut off: it holds the job's own script, so nobody there tells Slurm. The workers there live on."""
    run = tmp_path / "runs/cut"
    assert slurm.hosts is not None
    job = sbatch("run.dir=runs/cut", *LONG, "run.node_timeout_s=300")
    watch.wait_for_step(run, 15)
    old = [process.pid for process in slurm.processes_of(1)]
    moment = time.time()
    slurm.hosts.cut(1)
    record_property("cut_to_next_step_s", watch.next_step_after(run, moment))
    assert len(list(RunDir(run).generations.iterdir())) == 2
    slurm.hosts.heal(1)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"]) == ("COMPLETED", "0:0"), watch.log(run)
    assert ended["NodeList"] == "node[2-3]"
    slurm.wait_until(lambda: not any(map(psutil.pid_exists, old)), "the old processes to end")
    assert not list(RunDir(run).errors_folder.glob("*")), "they have said nothing in the new start's place"
    steps = watch.steps(run)
    assert sorted(set(steps)) == list(range(1, STEPS + 1))
    assert read_json(RunDir(run).result_json)["status"] == "done"


@pytest.mark.slow
def test_replica_groups_go_on_without_a_node_that_is_powered_off(
    slurm: Cluster, sbatch, watch, tmp_path: Path, record_property
) -> None:
    """Slurm takes the node from the job, and lets the job live. No job may replace the node."""
    run = RunDir(tmp_path / "runs/elastic")
    job = sbatch("run.dir=runs/elastic", *ELASTIC, "cluster.slurm.max_requeues=0")
    watch.wait_for_step(run.root, 15)
    slurm.power_off(2)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run.root)
    assert changes(run) == [("left", 1)]
    record_property("stall_s", run_events(run, "recovery")[0]["stall_s"])
    assert watch.steps(run.root) == list(range(1, ELASTIC_STEPS + 1))
    check_nothing_was_lost(run, may_lack_notes=True)


@pytest.mark.slow
def test_a_group_whose_cable_is_cut_comes_back_by_itself(
    slurm: Cluster, sbatch, watch, tmp_path: Path, record_property
) -> None:
    """Its agent ends what it runs, and asks for its seat again when there is a way."""
    run = RunDir(tmp_path / "runs/apart")
    assert slurm.hosts is not None
    job = sbatch("run.dir=runs/apart", *ELASTIC)
    watch.wait_for_step(run.root, 15)
    slurm.hosts.cut(2)
    slurm.wait_until(lambda: changes(run) == [("left", 1)], "the cut to be felt")
    record_property("stall_s", run_events(run, "recovery")[0]["stall_s"])
    slurm.hosts.heal(2)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run.root)
    assert changes(run) == [("left", 1), ("joined", 1)]
    assert watch.steps(run.root) == list(range(1, ELASTIC_STEPS + 1))
    check_nothing_was_lost(run, may_lack_notes=True)


@pytest.mark.slow
def test_replica_groups_get_another_node_for_one_that_is_powered_off(
    slurm: Cluster, sbatch, watch, tmp_path: Path, record_property
) -> None:
    """Slurm takes the node from the job. Another job, of one node, brings the agent of the lost group."""
    run = RunDir(tmp_path / "runs/replaced")
    job = sbatch("run.dir=runs/replaced", *ELASTIC)
    watch.wait_for_step(run.root, 15)
    moment = time.time()
    slurm.power_off(2)
    slurm.wait_until(lambda: changes(run) == [("left", 1), ("joined", 1)], "the group to return")
    record_property("death_to_return_s", run_events(run, "recovery")[1]["time"] - moment)
    (other,) = set(slurm.run("squeue", "--noheader", "--format=%A").split()) - {job}
    assert slurm.show(other)["NodeList"] == "node3"
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "0"), watch.log(run.root)
    slurm.wait(other)
    assert watch.steps(run.root) == list(range(1, ELASTIC_STEPS + 1))
    check_nothing_was_lost(run, may_lack_notes=True)
    log = watch.log(run.root) + "".join(path.read_text() for path in run.logs.glob("launch_*/torchrun.log"))
    assert f"job {other}" in log and "node 1 (node3): joined start 1" in log


@pytest.mark.slow
def test_replica_groups_restart_elsewhere_when_the_first_node_is_powered_off(
    slurm: Cluster, sbatch, watch, tmp_path: Path, record_property
) -> None:
    """Slurm lets the job live without its script. The other node's agent requeues it."""
    run = RunDir(tmp_path / "runs/headless")
    given = [argument for argument in ELASTIC if not argument.startswith("train.max_steps=")]
    job = sbatch("run.dir=runs/headless", *given, "checkpoint.interval_steps=5", "train.max_steps=60")
    watch.wait_for_step(run.root, 15)
    moment = time.time()
    slurm.power_off(1)
    slurm.wait_until(lambda: len(run_events(run, "start")) > 1, "the next start")
    record_property("death_to_next_start_s", run_events(run, "start")[1]["time"] - moment)
    ended = slurm.wait(job)
    assert (ended["JobState"], ended["ExitCode"], ended["Restarts"]) == ("COMPLETED", "0:0", "1"), watch.log(run.root)
    assert ended["NodeList"] == "node[2-3]" and run_events(run, "start")[1]["step"] >= 10
    assert sorted(set(watch.steps(run.root))) == list(range(1, 61))
