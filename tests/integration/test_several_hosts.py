"""Hosts that a user starts one by one, without Slurm: here processes of one machine, which reach one another by TCP."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterable
from typing import Any

import psutil
import pytest
from integration.conftest import slow_from
from lab.groups import changes, check_nothing_was_lost, losses, own_events, run_events
from lab.ports import free_port
from lab.waiting import wait_for

from trainspec_cli.run.folder.events import read_events
from trainspec_cli.run.folder.paths import RunDir

SMALL = ("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=4")


ELASTIC = (
    *("recipe=tiny", "resilience=elastic", "optim.schedule.kind=constant", "resilience.exchange_timeout_s=20"),
    *("resilience.heartbeat_timeout_s=10", "resilience.sdc_check=1", "run.preflight=false"),
)
ENDLESS = "train.max_steps=1000000"
SLOW = "slow(group=0,step=6,seconds=0.2,steps=10000)"
"""So that few steps are made while the other group is away."""


@pytest.fixture
def start_hosts(start_trainspec, tmp_path):
    """Starts the same command on two hosts, or on those of `nodes`; -> their processes, the first first."""
    endpoint = f"127.0.0.1:{free_port()}"

    def start(*arguments: str, nnodes: int = 2, nodes: Iterable[int] = ()):
        run = f"run.dir={tmp_path / 'run'}"
        common = (*arguments, "--nnodes", str(nnodes), "--rdzv-endpoint", endpoint)
        given = (*common, run) if arguments[0] == "launch" else common
        return [start_trainspec(*given, "--node-rank", str(node)) for node in nodes or range(nnodes)]

    return start


def steps_of(run: RunDir) -> list[int]:
    return [event["step"] for event in read_events(run.events(0)) if event["type"] == "step"]


def wait_for_step(run: RunDir, step: int, process) -> None:
    wait_for(lambda: max(steps_of(run), default=0) >= step, process)


def test_two_hosts_train_together(start_hosts, tmp_path):
    hosts = start_hosts("launch", *SMALL, "train.max_steps=8", "run.preflight=false")
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    run = RunDir(tmp_path / "run")
    assert steps_of(run) == list(range(1, 9))
    (start,) = [event for event in read_events(run.events(0)) if event["type"] == "start"]
    assert (start["world_size"], start["step"]) == (2, 0)


@pytest.mark.slow
def test_two_hosts_train_stop_and_resume(start_hosts, tmp_path):
    """Ctrl-C on the first host saves and ends both; given again, both go on at the next sample."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts("launch", *SMALL, "train.max_steps=60", "run.preflight=false", slow_from(5))
    wait_for_step(run, 5, hosts[0])
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6, 6], said
    hosts = start_hosts("resume", str(run.root))
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], said
    assert steps_of(run) == list(range(1, 61)), "no step twice, none left out"


@pytest.mark.slow
def test_a_host_that_dies_ends_the_run_within_its_deadline_and_is_named(start_hosts, tmp_path):
    """Its processes are stopped, so that its connections stay open: it is as if it was switched off."""
    run = RunDir(tmp_path / "run")
    ends = ("resilience.after_node_loss=end", "run.node_timeout_s=5", "run.preflight=false")
    hosts = start_hosts("launch", *SMALL, "train.max_steps=100000", *ends)
    wait_for_step(run, 5, hosts[0])
    family = [psutil.Process(hosts[1].pid), *psutil.Process(hosts[1].pid).children(recursive=True)]
    for process in family:
        process.suspend()
    said = hosts[0].communicate()[0]
    for process in family:
        process.kill()
    assert hosts[0].returncode == 5, said
    assert "node 1 (" in said
    assert "nothing for 5 s" in said
    assert json.loads(run.result_json.read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_host_that_never_comes_ends_the_run_with_what_to_type(start_hosts, tmp_path):
    (host,) = start_hosts("launch", *SMALL, "run.join_timeout_s=10", "run.preflight=false", nodes=(0,))
    said = " ".join(host.communicate()[0].split())
    assert host.returncode == 4, said
    assert "with --node-rank 1" in said and "--rdzv-endpoint 127.0.0.1:" in said
    assert json.loads(RunDir(tmp_path / "run").result_json.read_text())["exit_code"] == 4


def wait_for_change(run: RunDir, change: tuple[str, int], process) -> int:
    """-> the step that it came with."""
    wait_for(lambda: change in changes(run), process)
    return int(run_events(run, "recovery")[-1]["step"])


def stop_after_join(run: RunDir, hosts) -> None:
    """Some steps after group 1 has come back."""
    joined = wait_for_change(run, ("joined", 1), hosts[0])
    wait_for_step(run, joined + 5, hosts[0])
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6] * len(hosts), said


@pytest.mark.slow
def test_a_group_on_another_host_is_killed_and_heals(start_hosts, trainspec, tmp_path, record_property):
    """The losses are those of an unharmed run, on one host, bit for bit."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts(
        "launch", *ELASTIC, ENDLESS, "cluster.devices_per_node=1", f"fault=kill(group=1,step=5); {SLOW}"
    )
    stop_after_join(run, hosts)
    check_nothing_was_lost(run)
    left, joined = json.loads(run.result_json.read_text())["recoveries"]
    record_property("stall_s", [left["stall_s"], joined["stall_s"]])
    assert (left["kind"], left["step"], left["lost_steps"]) == ("left", 6, 1)
    assert (joined["kind"], joined["lost_steps"]) == ("joined", 0)
    alone = [event for event in run_events(run, "step") if left["step"] <= event["step"] < joined["step"]]
    assert alone and all(event["groups"] == [0] for event in alone)
    ended = trainspec("launch", *ELASTIC, f"train.max_steps={max(losses(run))}", "run.dir=unharmed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    unharmed = RunDir(tmp_path / "unharmed")
    assert losses(run) == losses(unharmed)
    assert len({event["weights_sha256"] for event in own_events(run, "end") + own_events(unharmed, "end")}) == 1


@pytest.mark.slow
def test_a_host_that_dies_is_gone_without_and_healed_when_it_is_started_again(
    start_hosts, kill_everything, tmp_path, record_property
):
    run = RunDir(tmp_path / "run")
    given = ("launch", *ELASTIC, ENDLESS, "cluster.devices_per_node=1", f"fault={SLOW}")
    first, second = start_hosts(*given)
    wait_for_step(run, 8, first)
    kill_everything(second)
    left = wait_for_change(run, ("left", 1), first)
    record_property("stall_s", run_events(run, "recovery")[-1]["stall_s"])
    wait_for_step(run, left + 3, first)
    (second,) = start_hosts(*given, nodes=(1,))
    stop_after_join(run, [first, second])
    check_nothing_was_lost(run, may_lack_notes=True)


@pytest.mark.slow
def test_replica_groups_restart_when_the_first_host_dies_and_heal_when_it_returns(
    start_hosts, trainspec, tmp_path, record_property
):
    """The second host takes over from the newest checkpoint. The losses are those of an unharmed run on one host."""
    run = RunDir(tmp_path / "run")
    given = (*ELASTIC, ENDLESS, "cluster.devices_per_node=1", "checkpoint.interval_steps=5", f"fault={SLOW}")
    first, second = start_hosts("launch", *given)
    wait_for_step(run, 8, second)
    moment = time.time()
    switch_off(first)
    wait_for(lambda: len(run_events(run, "start")) == 2, second)
    start = run_events(run, "start")[1]

    def later() -> list[dict[str, Any]]:
        return [event for event in run_events(run, "step") if event["time"] > start["time"]]

    wait_for(lambda: len(later()) > 3, second)
    record_property("death_to_next_step_s", later()[0]["time"] - moment)
    (again,) = start_hosts("resume", str(run.root), nodes=(0,))
    wait_for(lambda: ("joined", 1) in changes(run), second)
    wait_for_step(run, run_events(run, "recovery")[-1]["step"] + 3, second)
    second.send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in (second, again)]
    assert [second.returncode, again.returncode] == [6, 6], said
    assert "node 1: takes over the run" in said[0] and "node 0: joined start 2" in said[1]
    assert start["step"] >= 5
    ended = trainspec("launch", *ELASTIC, f"train.max_steps={max(losses(run))}", "run.dir=unharmed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert losses(run) == losses(RunDir(tmp_path / "unharmed"))


@pytest.mark.slow
def test_a_run_ends_well_without_a_host_that_died(start_hosts, kill_everything, tmp_path):
    run = RunDir(tmp_path / "run")
    first, second = start_hosts("launch", *ELASTIC, "train.max_steps=60", "cluster.devices_per_node=1", f"fault={SLOW}")
    wait_for_step(run, 8, first)
    kill_everything(second)
    said = first.communicate()[0]
    assert first.returncode == 0, said
    assert "node 1 (" in said
    assert "nodes are back" in said
    assert changes(run) == [("left", 1)]
    assert steps_of(run) == list(range(1, 61))
    check_nothing_was_lost(run, may_lack_notes=True)


@pytest.mark.slow
def test_two_groups_on_each_of_two_hosts(start_hosts, tmp_path):
    """One dies and its neighbour on the same host lives on."""
    run = RunDir(tmp_path / "run")
    given = ("cluster.devices_per_node=2", "resilience.replica_groups=4", f"fault=kill(group=1,step=5); {SLOW}")
    stop_after_join(run, start_hosts("launch", *ELASTIC, ENDLESS, *given))
    check_nothing_was_lost(run)
    assert changes(run) == [("left", 1), ("joined", 1)]


@pytest.mark.slow
def test_groups_of_two_hosts_that_share_a_model(start_hosts, tmp_path):
    """A worker on the last of four hosts dies, and its whole group with it."""
    run = RunDir(tmp_path / "run")
    given = ("cluster.devices_per_node=1", "layout=fsdp", f"fault=kill(group=1,rank=1,step=5); {SLOW}")
    stop_after_join(run, start_hosts("launch", *ELASTIC, ENDLESS, *given, nnodes=4))
    check_nothing_was_lost(run)


def test_one_host_of_several_is_not_started_by_itself(trainspec):
    refused = trainspec("launch", *SMALL, "cluster.num_nodes=2")
    assert refused.returncode == 2
    assert "`cluster.num_nodes`" in refused.stderr
    assert "trainspec sbatch" in refused.stderr
    assert "--nnodes 2 " in refused.stderr and " HOST:PORT" in refused.stderr


def test_hosts_need_a_folder_that_they_share(trainspec):
    refused = trainspec("launch", *SMALL, "--nnodes", "2", "--rdzv-endpoint", "localhost:29500")
    assert refused.returncode == 2
    assert "`run.dir` is auto" in refused.stderr


@pytest.mark.slow
def test_a_run_resumes_on_another_number_of_hosts_with_other_values(start_hosts, trainspec, tmp_path):
    """Three hosts, then two, then one; the losses are those of one host, whose rate changes at the same step."""
    run = RunDir(tmp_path / "run")
    three = start_hosts("launch", *THREE, "train.max_steps=10", nnodes=3)
    assert [host.communicate() and host.returncode for host in three] == [0, 0, 0]
    more = ("train.max_steps=20", "optim.lr=1e-4")
    two = start_hosts("resume", str(run.root), *more)
    said = [host.communicate()[0] for host in two]
    assert [host.returncode for host in two] == [0, 0], said
    ended = trainspec("resume", str(run.root), "cluster.num_nodes=1", "train.max_steps=25")
    assert ended.returncode == 0, ended.stderr
    assert worlds(run) == [3, 2, 1]
    alone = RunDir(tmp_path / "alone")
    assert trainspec("launch", *THREE, "train.max_steps=10", f"run.dir={alone.root}").returncode == 0
    for values in (more, ("train.max_steps=25",)):
        assert trainspec("resume", str(alone.root), *values).returncode == 0
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


THREE = (
    *("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=6"),
    *("precision.compute=fp32", "run.preflight=false", "optim.schedule.kind=constant", "checkpoint.interval_steps=5"),
)


def switch_off(host) -> None:
    """Kill all processes of a host at once."""
    family = [psutil.Process(host.pid), *psutil.Process(host.pid).children(recursive=True)]
    for process in family:
        process.suspend()
    for process in family:
        process.kill()
    host.wait()


def check_losses(run: RunDir, trainspec) -> None:
    """The losses are those of a run on one host, so each sample was used once. Rounding differs with the number of
    ranks, and grows from step to step; another sample would change a loss by a tenth."""
    last = max(steps_of(run))
    alone = RunDir(run.root.parent / "alone")
    ended = trainspec("launch", *THREE, f"train.max_steps={last}", f"run.dir={alone.root}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    changed = run_events(run, "start")[1]["step"]
    found, expected = losses(run), losses(alone)
    for step, loss in found.items():
        assert loss == pytest.approx(expected[step], rel=1e-4 if step < changed + 20 else 1e-2), step
    assert found.keys() == expected.keys()


def worlds(run: RunDir) -> list[int]:
    return [event["world_size"] for event in run_events(run, "start")]


def check_return(run: RunDir, node: int, hosts, trainspec) -> None:
    """Stop a run of three hosts, of which the first supervises, once the lost node trains again."""
    wait_for(lambda: worlds(run) == [3, 2, 3], hosts[0])
    wait_for_step(run, run_events(run, "start")[-1]["step"] + 3, hosts[0])
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6, 6, 6], said
    lost, back = nodes_told(run)
    assert [(one["reason"], one["node"], one["num_nodes"]) for one in (lost, back)] == [
        ("lost", node, 2),
        ("returned", node, 3),
    ]
    check_losses(run, trainspec)


@pytest.mark.slow
def test_a_run_goes_on_without_a_host_that_died_and_with_it_again(start_hosts, trainspec, tmp_path):
    """Three hosts, then two, then three."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts("launch", *THREE, ENDLESS, nnodes=3)
    wait_for_step(run, 7, hosts[0])
    switch_off(hosts[2])
    wait_for(lambda: worlds(run) == [3, 2], hosts[0])
    wait_for_step(run, run_events(run, "start")[-1]["step"] + 30, hosts[0])
    (again,) = start_hosts("launch", *THREE, ENDLESS, nnodes=3, nodes=(2,))
    check_return(run, 2, [hosts[0], hosts[1], again], trainspec)


@pytest.mark.slow
def test_another_host_takes_over_from_the_first(start_hosts, trainspec, tmp_path):
    """The first of three hosts dies, with the supervisor; later it returns under its number, and all three train."""
    run = RunDir(tmp_path / "run")
    hosts = start_hosts("launch", *THREE, ENDLESS, nnodes=3)
    wait_for_step(run, 7, hosts[0])
    switch_off(hosts[0])
    wait_for(lambda: worlds(run) == [3, 2], hosts[1])
    wait_for_step(run, run_events(run, "start")[-1]["step"] + 30, hosts[1])
    (again,) = start_hosts("resume", str(run.root), nnodes=3, nodes=(0,))
    check_return(run, 0, [*hosts[1:], again], trainspec)


@pytest.mark.slow
def test_a_spare_host_takes_the_place_of_one_that_died(start_hosts, tmp_path):
    run = RunDir(tmp_path / "run")
    spare = "cluster.reliability.spare_nodes=1"
    hosts = start_hosts("launch", *THREE, spare, ENDLESS, nnodes=2, nodes=range(3))
    wait_for_step(run, 7, hosts[0])
    switch_off(hosts[1])
    wait_for(lambda: worlds(run) == [2, 2], hosts[0])
    wait_for_step(run, run_events(run, "start")[-1]["step"] + 3, hosts[0])
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in (hosts[0], hosts[2])]
    assert [host.returncode for host in (hosts[0], hosts[2])] == [6, 6], said
    for part in ("stands by in start 1", "joined start 2", "the run is stopped"):
        assert f"node 2: {part}" in said[1]
    (lost,) = nodes_told(run)
    assert (lost["reason"], lost["node"], lost["spare"], lost["num_nodes"]) == ("lost", 1, 2, 2)


@pytest.mark.slow
def test_a_spare_host_that_is_not_needed_stands_by_until_the_run_is_done(start_hosts):
    spare = "cluster.reliability.spare_nodes=1"
    hosts = start_hosts("launch", *THREE, spare, "train.max_steps=8", nnodes=2, nodes=range(3))
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0, 0], said
    assert "node 2: stands by in start 1: a spare" in said[2] and "node 2: the run is done" in said[2]


@pytest.mark.slow
def test_a_slow_host_is_left_out_and_the_run_goes_on_without_it(start_hosts, trainspec, tmp_path):
    """One of three ranks becomes many times as slow, and has one of three samples: shares cannot help. Two hosts go on
    from the step that the three had reached. The losses are those of a run on one host: each sample was used once."""
    run = RunDir(tmp_path / "run")
    recipe = ("recipe=tiny", "cluster.devices_per_node=1", "data.seq_len=16", "batching.global_batch_size=3")
    recipe = (*recipe, "precision.compute=fp32", "run.preflight=false", "optim.schedule.kind=constant")
    scheduler = ("scheduler=auto", "scheduler.may_change=[nodes]", "scheduler.change=1")
    slow = "fault=throttle(step=10,rank=2,seconds=0.4,steps=1000000)"
    hosts = start_hosts("launch", *recipe, *scheduler, slow, ENDLESS, nnodes=3)
    wait_for(lambda: len(nodes_told(run)) >= 2, hosts[0], every_s=0.1)
    told = nodes_told(run)
    hosts[0].send_signal(signal.SIGINT)
    said = [host.communicate()[0] for host in hosts]
    assert [host.returncode for host in hosts] == [6, 6, 6], said
    assert "restarts without it" in said[0]
    assert "node 2: joined start 1" in said[2] and "node 2: stands by in start 2: it was dropped" in said[2]
    given, achieved = told
    assert (given["node"], given["num_nodes"], given["applied"]) == (2, 2, True)
    assert max(given["expected_s"], achieved["achieved_s"]) < given["before_s"]
    starts = [(event["step"], event["world_size"]) for event in run_events(run, "start")]
    assert starts == [(0, 3), (given["step"], 2)]
    last = max(steps_of(run))
    assert steps_of(run) == list(range(1, last + 1)), "no step twice, none left out"
    assert f"step {given['step']}: node 2 is dropped" in trainspec("report", "run").stdout
    alone = trainspec("launch", *recipe, f"train.max_steps={last}", "run.dir=alone")
    assert alone.returncode == 0, alone.stdout + alone.stderr
    assert losses(run) == pytest.approx(losses(RunDir(tmp_path / "alone")), rel=1e-4)


def nodes_told(run: RunDir) -> list[dict[str, Any]]:
    return [event for event in directives_of(run) if event["type"].startswith("nodes")]


def directives_of(run: RunDir) -> list[dict[str, Any]]:
    return list(read_events(run.directives)) if run.directives.exists() else []
