"""A rank of a real run that becomes slow is named, during the run and afterwards."""

from __future__ import annotations

import json

import pytest

from trainspec_cli.run.folder.event_types.events import VerdictEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir


@pytest.mark.slow
def test_a_rank_that_becomes_slow_is_named_with_its_place(trainspec, tmp_path):
    """It sleeps in its passes, so that other work of the machine, which takes processors, is not taken for it."""
    fault = "fault=throttle(step=60,rank=1,seconds=0.1,steps=200)"
    launched = trainspec(
        "launch", "recipe=tiny", "cluster.devices_per_node=2", "run.dir=slowed", "train.max_steps=130", fault
    )
    assert launched.returncode == 0, launched.stderr
    found = json.loads(trainspec("diagnose", "slowed", "--json").stdout)["verdicts"]
    slow = [verdict for verdict in found if verdict["cause"] == "slow_device"]
    assert [(verdict["rank"], verdict["until_step"]) for verdict in slow] == [(1, None)]
    assert 59 <= slow[0]["since_step"] <= 64
    assert slow[0]["cost_s"] >= 0.2
    told = [event for event in read_log(RunDir(tmp_path / "slowed").verdicts) if isinstance(event, VerdictEvent)]
    assert ("slow_device", 1) in {(event.verdict.cause, event.verdict.rank) for event in told}
    assert "slow device, rank 1" in launched.stdout
    shown = trainspec("report", "slowed").stdout
    assert "slow device, rank 1" in shown
