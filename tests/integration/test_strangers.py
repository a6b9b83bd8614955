"""What a stranger who reaches the ports of a running job can do to it: nothing."""

from __future__ import annotations

import json
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from lab.ports import free_port
from lab.waiting import wait_for

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.certify.launched import listening

IDLE = 150
"""Connections that a stranger opens to every port and leaves."""
PLAIN = ("recipe=tiny", "train.max_steps=1000000", "fault=slow(rank=0,step=1,seconds=0.1,steps=10000)")
GROUPS = (
    *("recipe=tiny", "train.max_steps=1000000", "resilience=elastic", "resilience.heartbeat_timeout_s=10"),
    "fault=slow(group=0,step=1,seconds=0.1,steps=10000)",
)


class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def last_step(run: RunDir) -> int:
    return max((event["step"] for event in read_events(run.events(0)) if event["type"] == "step"), default=0)


def await_step(run: RunDir, process, step: int) -> None:
    wait_for(lambda: last_step(run) >= step, process)


def molest(ports: set[tuple[str, int]], marker: Path) -> list[socket.socket]:
    """Garbage, pickled code, requests of several protocols; -> connections that are left idle."""
    trap = pickle.dumps(Trap(marker))
    words = (
        *(b"\0" * 64, trap, b"x" * 2**16, b'{"op": "set", "key": "k", "value": "v"}\n'),
        *(b"hello 0 stranger\nended 0\n", b"POST /replica/00000/kill HTTP/1.1\r\nHost: x\r\n\r\n"),
    )
    idle = []
    for port in ports:
        for word in words:
            with socket.create_connection(port, 20) as connection:
                try:
                    connection.sendall(word)
                except OSError:
                    continue
        idle += [socket.create_connection(port, 20) for _ in range(IDLE)]
    return idle


STORE_CLIENT = """
import os, sys, threading, torch.distributed as dist

def ask(address):
    host, port = address.split(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False)
    store.set("k", "v")
    if store.get("k") == b"v":
        print(address, flush=True)

asking = [threading.Thread(target=ask, args=(address,), daemon=True) for address in sys.argv[1:]]
for thread in asking:
    thread.start()
for thread in asking:
    thread.join(2)
os._exit(0)
"""
"""Prints where torch's own store answers, which believes whoever connects; elsewhere its client waits in vain."""


def find_torch_stores(ports: set[tuple[str, int]]) -> list[str]:
    command = [sys.executable, "-c", STORE_CLIENT, *(f"{host}:{port}" for host, port in ports)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()


@pytest.mark.slow
def test_torchs_own_store_would_be_found():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as other:
        ports = {("127.0.0.1", store.port), ("127.0.0.1", other.getsockname()[1])}
        assert find_torch_stores(ports) == [f"127.0.0.1:{store.port}"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [pytest.param(PLAIN, id="plain"), pytest.param(GROUPS, id="groups")])
def test_strangers_neither_end_nor_change_a_run(start_trainspec, tmp_path, recipe, environment, monkeypatch):
    monkeypatch.setitem(environment, "TMPDIR", str(tmp_path))
    run, marker = RunDir(tmp_path / "run"), tmp_path / "unpickled"
    started = start_trainspec("launch", *recipe, "run.dir=run")
    await_step(run, started, 3)
    ports = listening(psutil.Process(started.pid))
    assert {address for address, _ in ports} == {"127.0.0.1"}, "nothing listens beyond this host"
    assert find_torch_stores(ports) == []
    stores = list(tmp_path.glob("trainspec-*/store"))
    assert {store.parent.stat().st_mode & 0o777 for store in stores} == {0o700}
    idle = molest(ports, marker)
    await_step(run, started, last_step(run) + 10)
    started.send_signal(signal.SIGINT)
    output = started.communicate()[0]
    assert started.returncode == 6, output
    result = json.loads(run.result_json.read_text())
    assert (result["status"], result["recoveries"]) == ("stopped", [])
    assert not marker.exists()
    assert not any(store.parent.exists() for store in stores)
    steps = [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    for connection in idle:
        connection.close()


@pytest.mark.slow
def test_strangers_do_not_disturb_a_job_of_two_hosts(start_trainspec, tmp_path):
    """The hub and the rendezvous server among what they reach."""
    run, marker = RunDir(tmp_path / "run"), tmp_path / "unpickled"
    common = (
        *("recipe=tiny", "cluster.devices_per_node=1", "train.max_steps=1000000", "run.preflight=false"),
        *("fault=slow(rank=0,step=1,seconds=0.1,steps=10000)", f"run.dir={run.root}"),
        *("--nnodes", "2", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"),
    )
    hosts = [start_trainspec("launch", *common, "--node-rank", str(node)) for node in range(2)]
    await_step(run, hosts[0], 3)
    ports = set().union(*(listening(psutil.Process(host.pid)) for host in hosts))
    assert {address for address, _ in ports} == {"127.0.0.1"}, "the job's interface"
    assert find_torch_stores(ports) == []
    idle = molest(ports, marker)
    await_step(run, hosts[0], last_step(run) + 10)
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6, 6], said
    assert json.loads(run.result_json.read_text())["recoveries"] == []
    assert not marker.exists()
    for connection in idle:
        connection.close()
