"""Where the time goes from the death of a node to the first new step, on emulated nodes:
`python tests/bench/failover.py [CASE ...] [--repeat N]`. Needs root (network namespaces).

Each node is a network namespace with its own /dev/shm, so that the memory of a node that dies is lost with it.

fewer   all processes of the last of four nodes are killed; the run restarts on three nodes
spare   the same with a fifth node connected, which takes its place
worker  one worker is killed on a node that stays
first   all processes of node 0 are killed, and another node takes over the run
cut     the cable of the last node is pulled, so that no connection closes

With --memory, the state is also copied to the neighbour's memory after every step, and no checkpoint is on disk.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from lab.hosts import Hosts, kill
from lab.ports import free_port

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

CASES = ("fewer", "spare", "worker", "first", "cut")
RECIPE = (
    *("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=12"),
    *("run.preflight=false", "optim.schedule.kind=constant", "train.max_steps=1000000"),
    "fault=slow(step=0,seconds=0.05,steps=1000000)",
)
ON_DISK = ("checkpoint.interval_steps=10",)
IN_MEMORY = ("checkpoint.interval_steps=null", "checkpoint.memory_interval_steps=1")
NODES = 4
PHASES = ("detect", "end", "open", "agents", "spawn", "import", "join", "build", "restore", "prepare", "step")
"""Detect the loss, end the old processes, open the next generation, connect the agents, start the workers, import
torch, join the processes, build the model, load the state, prepare the first step, and take it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=CASES)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--show", action="store_true", help="print the nodes' output")
    options = parser.parse_args()
    print(f"{'case':8}" + "".join(f"{phase:>9}" for phase in (*PHASES, "all", "lost")))
    for case in options.cases:
        found = [measure(case, memory=options.memory, show=options.show) for _ in range(options.repeat)]
        for times in found:
            print(line(case, times), flush=True)
        middle = {phase: statistics.median(times[phase] for times in found) for phase in found[0]}
        print(line("median", middle), flush=True)


def line(name: str, times: dict[str, float]) -> str:
    return f"{name:8}" + "".join(f"{times[phase]:9.2f}" for phase in (*PHASES, "all", "lost"))


def measure(case: str, *, memory: bool, show: bool = False) -> dict[str, float]:
    """Let one node or worker of a run fail; return the seconds of each phase until the first new step, and the number
    of steps that are repeated."""
    count = NODES + (case == "spare")
    hosts = Hosts(count)
    root = Path(tempfile.mkdtemp(prefix="trainspec-failover-"))
    run = RunDir(root / "run")
    started: list[subprocess.Popen[bytes]] = []
    try:
        settings = (*RECIPE, *(IN_MEMORY if memory else ON_DISK), f"run.dir={run.root}")
        spares = (f"cluster.reliability.spare_nodes={count - NODES}",) if count > NODES else ()
        endpoint = f"{hosts.address(1)}:{free_port()}"
        for node in range(count):
            command = [*hosts.inside(node + 1, own_memory=True), sys.executable, "-m", "trainspec_cli", "launch"]
            nodes = ("--nnodes", str(NODES), "--node-rank", str(node), "--rdzv-endpoint", endpoint)
            output = None if show else subprocess.DEVNULL
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TRAINSPEC_PROBE": "off"}
            started.append(
                subprocess.Popen([*command, *settings, *spares, *nodes], env=environment, stdout=output, stderr=output)
            )
        wait_for_steps(run, 25)
        while not all(has_standby(hosts, number) for number in hosts.numbers):
            time.sleep(0.5)
        victim = 1 if case == "first" else NODES
        at = time.time()
        if case == "cut":
            hosts.cut(victim)
        elif case == "worker":
            for pid in hosts.processes(victim):
                if rank_of(psutil.Process(pid)) is not None:
                    kill(pid)
        else:
            hosts.switch_off(victim)
        return phases(run, at, lost_supervisor=case == "first")
    finally:
        hosts.remove()
        for process in started:
            process.wait()


def has_standby(hosts: Hosts, number: int) -> bool:
    for pid in hosts.processes(number):
        with suppress(psutil.NoSuchProcess):
            if psutil.Process(pid).name() == "standby":
                return True
    return False


def wait_for_steps(run: RunDir, step: int, after: float = 0.0) -> None:
    deadline = time.monotonic() + 300
    while not any(e["time"] > after and e.get("step", 0) >= step for e in events(run, "step")):
        assert time.monotonic() < deadline, f"no step {step} in {run.root}"
        time.sleep(0.1)


def events(run: RunDir, kind: str) -> list[dict[str, object]]:
    return [event for event in read_events(run.events(0)) if event["type"] == kind]


def phases(run: RunDir, at: float, *, lost_supervisor: bool) -> dict[str, float]:
    deadline = time.monotonic() + 300
    while not (starts := [event for event in events(run, "start") if event["time"] > at]):
        assert time.monotonic() < deadline, f"the run in {run.root} has not started again"
        time.sleep(0.1)
    start = starts[0]
    wait_for_steps(run, 0, start["time"])
    first = next(event for event in events(run, "step") if event["time"] > start["time"])
    before = max(event["step"] for event in events(run, "step") if event["time"] < start["time"])
    marks = [event for event in read_events(run.supervisor_events) if event["time"] > at]
    launched = next(event["time"] for event in marks if event["type"] == "launch")
    failed = launched if lost_supervisor else next(event["time"] for event in marks if event["type"] == "failure")
    ended = launched if lost_supervisor else next(event["time"] for event in marks if event["type"] == "ended")
    logs = max(run.logs.glob("launch_*/"), key=lambda folder: folder.stat().st_mtime)
    spawned = max(born(log) for log in logs.glob("node*/torchrun.log"))
    startup = start["startup_s"]
    worker = start["time"] - sum(startup.values())
    moments = [at, failed, ended, launched, spawned, worker]
    times = dict(zip(PHASES, (later - earlier for earlier, later in pairwise(moments)), strict=False))
    times |= startup
    times["step"] = first["time"] - start["time"]
    return times | {"all": first["time"] - at, "lost": before - start["step"]}


def born(path: Path) -> float:
    return float(subprocess.run(["stat", "-c", "%.W", path], capture_output=True, text=True, check=True).stdout)


if __name__ == "__main__":
    main()
