"""Replica groups on real processes: groups die, others step on, and nothing is lost."""

import json
import signal
import subprocess
from pathlib import Path

import pytest
from lab.device_backend import DIES, install
from lab.groups import changes, check_nothing_was_lost, losses, own_events, run_events
from lab.waiting import PATIENCE_S, wait_for

from trainspec_cli.run.folder.paths import RunDir

ENDLESS = "train.max_steps=1000000"
ELASTIC = (
    *("recipe=tiny", "resilience=elastic", "optim.schedule.kind=constant", "resilience.exchange_timeout_s=20"),
    "resilience.heartbeat_timeout_s=10",
)
"""A group that a busy machine holds up for some seconds is not taken for dead."""


def run_until_healed(start_trainspec, root: Path, fault: str, group: int, *arguments: str) -> RunDir:
    """An elastic run that is stopped some steps after `group` has come back; the steps until then are slow and few."""
    run = RunDir(root / "elastic")
    other = 1 - group
    slow = f"fault={fault}(group={group},step=5); slow(group={other},step=6,seconds=0.2,steps=10000)"
    process = start_trainspec("launch", *ELASTIC, ENDLESS, "run.dir=elastic", slow, *arguments)
    stop_after_join(run, group, process)
    return run


def stop_after_join(run: RunDir, group: int, process: subprocess.Popen[str]) -> None:
    """Some steps after the group has come back, however long that takes."""
    wait_for(lambda: ("joined", group) in changes(run), process)
    joined = run_events(run, "recovery")[-1]["step"]
    wait_for(lambda: max(losses(run)) >= joined + 5, process)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 6, output


def test_a_group_is_killed_and_heals(start_trainspec, tmp_path):
    kill_and_heal(start_trainspec, tmp_path)


def kill_and_heal(start_trainspec, root: Path) -> RunDir:
    run = run_until_healed(start_trainspec, root, "kill", 1, "resilience.sdc_check=1")
    check_nothing_was_lost(run)
    left, joined = (event for event in json.loads(run.result_json.read_text())["recoveries"])
    assert (left["kind"], left["step"], left["lost_steps"]) == ("left", 6, 1)
    assert (joined["kind"], joined["lost_steps"]) == ("joined", 0)
    alone = [event for event in run_events(run, "step") if left["step"] <= event["step"] < joined["step"]]
    assert alone and all(event["groups"] == [0] and event["samples"] == 8 for event in alone)
    return run


@pytest.mark.slow
def test_the_losses_of_a_healed_run_are_those_of_an_unharmed_one(start_trainspec, trainspec, tmp_path):
    """With two groups the bits are the same: a sum of two does not depend on their order."""
    run = kill_and_heal(start_trainspec, tmp_path)
    steps = max(losses(run))
    ended = trainspec("launch", *ELASTIC, f"train.max_steps={steps}", "run.dir=unharmed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    unharmed = RunDir(tmp_path / "unharmed")
    assert losses(run) == losses(unharmed)
    assert {event["weights_sha256"] for event in own_events(run, "end") + own_events(unharmed, "end")} == {
        json.loads(run.result_json.read_text())["weights_sha256"]
    }


@pytest.mark.slow
def test_a_group_that_is_killed_in_a_sum_on_the_devices_own_backend(
    start_trainspec, environment, monkeypatch, tmp_path
):
    """The other aborts what its device waits for, makes the step again, and gives the state over the same backend.

    The backend is the lab's, in the place of the CPU's: a lost peer is no error there, its sums would wait for ever.
    """
    plugin = install(tmp_path / "plugin")
    slow = "fault=slow(group=0,step=8,seconds=0.2,steps=10000)"
    elastic = [word.replace("exchange_timeout_s=20", f"exchange_timeout_s={4 * PATIENCE_S}") for word in ELASTIC]
    for name, value in (plugin | {DIES: "1:9"}).items():
        monkeypatch.setitem(environment, name, value)
    run = RunDir(tmp_path / "run")
    process = start_trainspec("launch", *elastic, slow, ENDLESS, "run.dir=run")
    stop_after_join(run, 1, process)
    left, joined = run_events(run, "recovery")
    assert (left["change"], left["group"], left["lost_steps"]) == ("left", 1, 1)
    assert left["stall_s"] < PATIENCE_S, "far below the exchange timeout"
    assert (joined["change"], joined["group"]) == ("joined", 1)
    check_nothing_was_lost(run)
    calls = {path.stem: json.loads(path.read_text().splitlines()[-1]) for path in (tmp_path / "plugin/calls").iterdir()}
    assert calls["1-1"] == {"allreduce": 9}
    assert calls["0-1"]["abort"] >= 1 and calls["0-1"]["allreduce"] > 9
    assert calls["0-1"]["send"] == calls["1-2"]["recv"] > 1


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["layout=fsdp", "layout.tp=2", "layout.pp=2"])
def test_groups_of_two_ranks_that_share_a_model(start_trainspec, tmp_path, layout):
    """One rank of a group dies, and the whole group with it."""
    run = run_until_healed(
        *(start_trainspec, tmp_path, "kill", 1, layout, "cluster.devices_per_node=4"),
        *("resilience.replica_groups=2", "resilience.sdc_check=1"),
    )
    check_nothing_was_lost(run)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["stop", "hang", "exception", "oom"])
def test_other_ways_to_fail(start_trainspec, tmp_path, fault):
    check_nothing_was_lost(run_until_healed(start_trainspec, tmp_path, fault, 0))


@pytest.mark.slow
def test_a_shrunken_batch_takes_the_learning_rate_along(start_trainspec, tmp_path):
    run = run_until_healed(start_trainspec, tmp_path, "kill", 1, "batching.on_loss=shrink", "optim.lr=0.001")
    check_nothing_was_lost(run)
    rates = {(event["samples"], round(event["lr"], 9)) for event in run_events(run, "step")}
    assert rates == {(8, 0.001), (4, 0.0005)}


@pytest.mark.slow
def test_too_few_groups_end_the_run_with_a_checkpoint(trainspec, tmp_path):
    ended = trainspec(
        *("launch", *ELASTIC, ENDLESS, "checkpoint.interval_steps=null", "run.dir=run", "fault=kill(group=1,step=5)"),
        *("resilience.min_groups=2", "resilience.max_restarts_per_hour=0"),
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 5, said
    assert "1 of 2 replica groups" in said and "resilience.min_groups is 2" in said
    run = RunDir(tmp_path / "run")
    assert run.checkpoint_steps() == [5]
    assert json.loads(run.result_json.read_text())["status"] == "failed"


@pytest.mark.slow
def test_a_group_that_fails_too_often_stays_away_and_the_others_finish(trainspec, tmp_path):
    ended = trainspec(
        *("launch", *ELASTIC, "train.max_steps=30", "run.dir=run", "fault=kill(group=0,step=5)"),
        "resilience.max_restarts_per_hour=0",
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "not restarted" in ended.stdout
    run = RunDir(tmp_path / "run")
    assert changes(run) == [("left", 0)]
    check_nothing_was_lost(run)


@pytest.mark.slow
def test_a_flipped_bit_is_found_and_its_group_named(trainspec):
    ended = trainspec(
        *("launch", *ELASTIC, ENDLESS, "fault=bitflip(group=2,step=5)", "resilience.sdc_check=4"),
        *("resilience.replica_groups=4", "cluster.devices_per_node=4"),
    )
    said = ended.stdout + ended.stderr
    assert ended.returncode == 5, said
    assert "parameters of group 2" in said and "after step 8" in said


@pytest.mark.slow
def test_a_lighthouse_that_is_killed_costs_no_step(trainspec, tmp_path):
    ended = trainspec("launch", *ELASTIC, "train.max_steps=30", "run.dir=run", "fault=lighthouse(step=5)")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rendezvous server ended" in ended.stdout
    run = RunDir(tmp_path / "run")
    assert [change for change, _ in changes(run) if change != "retried"] == []
    check_nothing_was_lost(run)


@pytest.mark.slow
def test_groups_whose_supervisor_is_killed_save_and_end(start_trainspec, tmp_path):
    """They agree on the step to stop at through the rendezvous server, which outlives its supervisor for that."""
    run = RunDir(tmp_path / "elastic")
    process = start_trainspec(
        "launch", *ELASTIC, ENDLESS, "run.dir=elastic", "fault=slow(step=5,seconds=0.1,steps=9999)"
    )
    wait_for(lambda: max(losses(run), default=0) >= 10, process)
    process.kill()
    process.wait(PATIENCE_S)
    wait_for(run.checkpoint_steps)
    check_nothing_was_lost(run)


@pytest.mark.slow
def test_a_run_restarts_from_its_last_checkpoint_as_long_as_there_is_a_newer_one(trainspec, tmp_path):
    plain = trainspec("launch", "recipe=tiny", "checkpoint.interval_steps=4", "run.dir=plain")
    ended = trainspec(
        *("launch", "recipe=tiny", "checkpoint.interval_steps=4", "checkpoint.mode=sync", "run.dir=run"),
        *("fault=kill(step=6,rank=1); exception(step=11); kill(step=13)", "resilience.max_restarts_per_hour=3"),
    )
    assert plain.returncode == ended.returncode == 0, ended.stdout + ended.stderr
    results = [json.loads((tmp_path / name / "result.json").read_text()) for name in ("plain", "run")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    recoveries = results[1]["recoveries"]
    assert [(r["kind"], r["step"], r["lost_steps"]) for r in recoveries] == [
        ("restart", 6, 2),
        ("restart", 11, 3),
        ("restart", 13, 1),
    ]
    assert all(r["stall_s"] > 0 for r in recoveries)
