"""Hosts that a user starts one by one, without Slurm: here processes of one machine, which reach one another by TCP."""

from __future__ import annotations

import json
import signal
import time

import psutil
import pytest

from trainspec_cli.launch.place import free_port
from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir

SMALL = ("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=4")


@pytest.fixture
def start_hosts(start_trainspec, tmp_path):
    """Starts the same command on two hosts; -> their processes, the first first."""

    def start(*arguments: str):
        endpoint = f"127.0.0.1:{free_port()}"
        run = f"run.dir={tmp_path / 'run'}"
        common = (*arguments, "--nnodes", "2", "--rdzv-endpoint", endpoint)
        given = (*common, run) if arguments[0] == "launch" else common
        return [start_trainspec(*given, "--node-rank", str(node)) for node in (0, 1)]

    return start


def steps_of(run: RunDir) -> list[int]:
    return [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]


def wait_for_step(run: RunDir, step: int, process) -> None:
    deadline = time.monotonic() + 240
    while max(steps_of(run), default=0) < step:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.05)


@pytest.mark.slow
def test_two_hosts_train_stop_and_resume(start_hosts, tmp_path):
    """Ctrl-C on the first host saves and ends both; given again, both go on at the next sample."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts("launch", *SMALL, "train.max_steps=60", "run.preflight=false")
    wait_for_step(run, 5, hosts[0])
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6, 6], said
    hosts = start_hosts("resume", str(run.root))
    said = [host.communicate(timeout=240)[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert steps_of(run) == list(range(1, 61)), "no step twice, none left out"


@pytest.mark.slow
def test_a_host_that_dies_ends_the_run_within_its_deadline_and_is_named(start_hosts, tmp_path):
    """Its processes are stopped, so that its connections stay open: it is as if it was switched off."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts("launch", *SMALL, "train.max_steps=100000", "run.node_timeout_s=5", "run.preflight=false")
    wait_for_step(run, 5, hosts[0])
    family = [psutil.Process(hosts[1].pid), *psutil.Process(hosts[1].pid).children(recursive=True)]
    for process in family:
        process.suspend()
    said = hosts[0].communicate(timeout=120)[0]
    for process in family:
        process.kill()
    assert hosts[0].returncode == 5, said
    assert "node 1 (host " in said
    assert "has not been heard of for 5 s" in said
    assert json.loads(run.result_json.read_text())["status"] == "failed"


def test_one_host_of_several_is_not_started_by_itself(trainspec):
    refused = trainspec("launch", *SMALL, "cluster.num_nodes=2")
    assert refused.returncode == 2
    assert "`cluster.num_nodes` is 2, and this command starts one host" in refused.stderr
    assert "trainspec sbatch" in refused.stderr
    assert "--nnodes 2 --node-rank I --rdzv-endpoint HOST:PORT" in refused.stderr


def test_hosts_need_a_folder_that_they_share(trainspec):
    refused = trainspec("launch", *SMALL, "--nnodes", "2", "--rdzv-endpoint", "localhost:29500")
    assert refused.returncode == 2
    assert "`run.dir` is auto, and the hosts would each make a folder of their own" in refused.stderr
