"""Four hosts with networks and memories of their own, of which one dies: the run goes on from its neighbour's memory,
with workers that standbys start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from lab import hosts as lab_hosts
from lab.groups import losses, run_events
from lab.hosts import Hosts
from lab.ports import free_port
from lab.waiting import wait_for

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.memory import MEMORY
from trainspec_cli.run.folder.paths import RunDir

NODES = 4
RECIPE = (
    *("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=12"),
    *("precision.compute=fp32", "run.preflight=false", "optim.schedule.kind=constant"),
)
IN_MEMORY = (
    *("checkpoint.interval_steps=null", "checkpoint.memory_interval_steps=1", "train.max_steps=1000000"),
    "fault=slow(step=0,seconds=1,steps=1000000)",
)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if why := lab_hosts.lacking():
        pytest.skip(why)
    made = Hosts(NODES + 1)
    yield made
    made.remove()


def named(hosts: Hosts, number: int, holds) -> list[psutil.Process]:
    found = []
    for pid in hosts.processes(number):
        try:
            process = psutil.Process(pid)
            if holds(process):
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "spares", "world_size"),
    [(NODES, 0, NODES - 1), (NODES, 1, NODES), (1, 0, NODES - 1)],
    ids=["fewer", "spare", "first"],
)
def test_a_run_goes_on_from_memory_with_standbys(
    hosts: Hosts, environment, trainspec, tmp_path: Path, victim: int, spares: int, world_size: int
) -> None:
    run = RunDir(tmp_path / "run")
    endpoint = f"{hosts.address(1)}:{free_port()}"
    settings = (*RECIPE, *IN_MEMORY, f"cluster.reliability.spare_nodes={spares}", f"run.dir={run.root}")
    common = (*settings, "--nnodes", str(NODES), "--rdzv-endpoint", endpoint)
    numbers = range(1, NODES + spares + 1)
    started = {
        number: subprocess.Popen(
            [
                *hosts.inside(number, own_memory=True),
                *(sys.executable, "-m", "trainspec_cli", "launch", *common, "--node-rank", str(number - 1)),
            ],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in numbers
    }
    watched = started[2]

    def standbys() -> dict[int, list[int]]:
        waiting = {number: named(hosts, number, lambda one: one.name() == "standby") for number in numbers}
        return {number: [one.pid for one in found] for number, found in waiting.items()}

    def first_step_after(step: int) -> bool:
        return max(losses(run), default=0) > step

    try:
        wait_for(lambda: first_step_after(5) and all(standbys().values()), watched, every_s=0.5)
        ready = standbys()
        hosts.switch_off(victim)
        reached = max(losses(run))
        wait_for(lambda: len(run_events(run, "start")) > 1, watched, every_s=0.5)
        start = run_events(run, "start")[1]
        wait_for(lambda: first_step_after(start["step"] + 3), watched, every_s=0.5)
        for number in numbers:
            if number != victim:
                (worker,) = named(hosts, number, lambda one: rank_of(one) is not None)
                assert [worker.ppid()] == ready[number], "its torchrun was the standby"
        assert start["world_size"] == world_size
        assert start["restored_from"].startswith(str(MEMORY))
        assert reached - start["step"] <= 1
        assert not run.checkpoint_steps()
    finally:
        left = hosts.remove()
        for process in started.values():
            process.wait()
    assert left, "the run was going on"
    last = start["step"] + 3
    ended = trainspec("launch", *RECIPE, f"train.max_steps={last}", "cluster.num_nodes=1", "run.dir=alone")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    expected = losses(RunDir(tmp_path / "alone"))
    assert {step: loss for step, loss in losses(run).items() if step <= last} == pytest.approx(expected, rel=1e-4)
