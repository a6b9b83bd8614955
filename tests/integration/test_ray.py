"""Runs on a Ray cluster whose hosts die."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import hosts as lab_hosts
from lab.groups import losses, run_events
from lab.hosts import Hosts
from lab.ray_hosts import HEAD, RayHosts
from lab.waiting import wait_for

from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

pytest.importorskip("ray")
pytestmark = pytest.mark.slow
RECIPE = (
    *("recipe=tiny", "cluster.manager=ray", "cluster.devices_per_node=1", "data.seq_len=16"),
    *("batching.global_batch_size=6", "precision.compute=fp32", "run.preflight=false"),
    *("optim.schedule.kind=constant", "checkpoint.interval_steps=5"),
)
ENDLESS = ("train.max_steps=100000", "fault=slow(step=1,seconds=0.1,steps=100000)")
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHosts]:
    """A head and three hosts with one CPU each."""
    if why := lab_hosts.lacking():
        pytest.skip(why)
    cluster = RayHosts(Hosts(4), tmp_path_factory.mktemp("ray"))
    yield cluster
    assert cluster.close() == []


@pytest.fixture
def start(cluster: RayHosts, environment: dict[str, str], tmp_path: Path) -> Iterator[Start]:
    """Starts `trainspec ARGUMENTS` on the head. All hosts are up before."""
    for number in cluster.hosts.numbers:
        if not lab_hosts.pids_on(number):
            cluster.start(number)
    started: list[subprocess.Popen[str]] = []

    def begin(*arguments: str, **variables: str) -> subprocess.Popen[str]:
        command = [*cluster.hosts.inside(HEAD), sys.executable, "-m", "trainspec_cli", *arguments]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env=environment | cluster.environment | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for process in started:
        process.kill()
        process.wait()


def wait_for_step(run: RunDir, step: int, process: subprocess.Popen[str] | None) -> None:
    wait_for(lambda: max(losses(run), default=0) >= step, process, every_s=0.1)


def wait_for_restart(run: RunDir, sizes: list[int], process: subprocess.Popen[str] | None = None) -> None:
    """Until the last start, with this many ranks, has made a step."""

    def has_made_one() -> bool:
        starts = run_events(run, "start")
        return worlds(run) == sizes and run_events(run, "step")[-1]["time"] > starts[-1]["time"]

    wait_for(has_made_one, process, every_s=0.1)


def worlds(run: RunDir) -> list[int]:
    return [event["world_size"] for event in run_events(run, "start")]


def supervising_host(cluster: RayHosts, run: RunDir) -> int:
    record = generations.read(run, generations.newest(run))
    assert record is not None
    return int(record.host.removeprefix("node"))


AGENT = "ray::AgentActor.serve"
SUPERVISOR = "ray::SupervisorActor"
WORKER = "trainspec_cli.engine"


def resumed_in_s(run: RunDir, killed_at: float) -> float:
    """Seconds from a kill to the first step after the next start."""
    starts = [event["time"] for event in run_events(run, "start") if event["time"] > killed_at]
    return min(event["time"] for event in run_events(run, "step") if event["time"] > starts[0]) - killed_at


def told(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directives) if event["type"] == "nodes"]


def check_losses(run: RunDir, trainspec: Any) -> None:
    """The losses are those of a run on one host without Ray: each sample was used once."""
    last = max(losses(run))
    own = (*(word for word in RECIPE if "manager" not in word), f"train.max_steps={last}", "run.dir=alone")
    ended = trainspec("launch", *own)
    assert ended.returncode == 0, ended.stderr
    expected = losses(RunDir(run.root.parent / "alone"))
    assert losses(run).keys() == expected.keys()
    first = run_events(run, "start")[1]["step"]
    for step, loss in losses(run).items():
        assert loss == pytest.approx(expected[step], rel=1e-4 if step < first + 20 else 1e-2), step


def test_a_run_on_a_ray_cluster_ends_and_is_resumed_on_fewer_nodes_with_other_values(start, trainspec, tmp_path):
    run = RunDir(tmp_path / "run")
    ended = start("launch", *RECIPE, "cluster.num_nodes=3", "train.max_steps=6", f"run.dir={run.root}")
    said = ended.communicate()[0]
    assert ended.returncode == 0, said
    assert "done after 6 steps" in said
    again = start("resume", str(run.root), "cluster.num_nodes=2", "train.max_steps=12")
    said = again.communicate()[0]
    assert again.returncode == 0, said
    assert worlds(run) == [3, 2]
    assert sorted(losses(run)) == list(range(1, 13))
    check_losses(run, trainspec)


def test_a_spare_takes_the_place_of_a_host_that_died_and_ctrl_c_stops_with_a_checkpoint(
    start, cluster, trainspec, tmp_path, record_property
):
    run = RunDir(tmp_path / "run")
    spare = "cluster.reliability.spare_nodes=1"
    launched = start("launch", *RECIPE, *ENDLESS, spare, "cluster.num_nodes=2", f"run.dir={run.root}")
    wait_for_step(run, 7, launched)
    wait_for(lambda: len(cluster.with_process(AGENT)) == 3, launched)
    victim = next(host for host in cluster.with_process(WORKER) if host != supervising_host(cluster, run))
    killed_at = cluster.kill(victim)
    wait_for_restart(run, [2, 2], launched)
    record_property("resumed_in_s", resumed_in_s(run, killed_at))
    (lost,) = told(run)
    assert (lost["reason"], lost["host"], lost["num_nodes"], "spare" in lost) == ("lost", f"node{victim}", 2, True)
    launched.send_signal(signal.SIGINT)
    said = launched.communicate()[0]
    assert launched.returncode == 6, said
    wait_for(lambda: not any(map(cluster.with_process, (WORKER, AGENT, SUPERVISOR))))
    check_losses(run, trainspec)


def test_another_host_supervises_if_that_host_dies_and_the_run_goes_on_without_its_launcher(
    start, cluster, trainspec, tmp_path, record_property
):
    """Three hosts, then two, then three; the command that started the run was killed before."""
    run = RunDir(tmp_path / "run")
    launched = start("launch", *RECIPE, *ENDLESS, "cluster.num_nodes=3", f"run.dir={run.root}")
    wait_for_step(run, 7, launched)
    launched.kill()
    step = max(losses(run))
    wait_for(lambda: max(losses(run)) > step + 5, every_s=0.1)
    victim = supervising_host(cluster, run)
    killed_at = cluster.kill(victim)
    wait_for_restart(run, [3, 2])
    record_property("resumed_in_s", resumed_in_s(run, killed_at))
    assert supervising_host(cluster, run) != victim
    cluster.start(victim)
    wait_for_restart(run, [3, 2, 3])
    assert [(one["reason"], one["num_nodes"]) for one in told(run)] == [("lost", 2), ("returned", 3)]
    stopped = start("stop", str(run.root))
    assert stopped.wait() == 0, stopped.communicate()[0]
    assert json.loads(run.result_json.read_text())["status"] == "stopped"
    wait_for(lambda: not any(map(cluster.with_process, (WORKER, AGENT, SUPERVISOR))))
    check_losses(run, trainspec)


def test_what_is_missing_is_said(start, cluster, tmp_path):
    """-> exit code 4 and the line to type: a wrong token, no cluster, too few nodes"""
    launch = ("launch", *RECIPE, "train.max_steps=2", "run.join_timeout_s=2")
    cases = {
        "ray_token": ("cluster.num_nodes=2", {"RAY_AUTH_TOKEN": "another-token-of-the-lab-0123456789"}),
        "no_ray": ("cluster.num_nodes=2", {"RAY_ADDRESS": f"{cluster.hosts.address(HEAD)}:9"}),
        "too_few_nodes": ("cluster.num_nodes=9", {}),
    }
    for code, (nodes, variables) in cases.items():
        refused = start(*launch, nodes, "--json", f"run.dir={tmp_path / code}", **variables)
        said = refused.communicate()[0]
        assert refused.returncode == 4, said
        assert f'"{code}"' in said and not (tmp_path / code).exists()
