"""The recipe that shows what fine-tuning is: a chat model learns to reply, then adapters go on from it."""

from __future__ import annotations

import pytest

from trainspec_cli.rundir.events import read_events
from trainspec_cli.rundir.paths import RunDir


@pytest.mark.slow
def test_it_learns_to_reply_and_adapters_go_on_from_it(trainspec, read_result, tmp_path):
    launch = ("launch", "recipe=tiny_chat", "cluster.devices_per_node=1")
    ended = trainspec(*launch, "run.dir=whole")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "The opposite of hot is cold." in ended.stdout
    adapted = ("run.dir=adapted", "init.from=whole", "lora.rank=4", "optim.lr=1e-4", "train.max_steps=5")
    ended = trainspec(*launch, *adapted)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = {
        run: [event["loss"] for event in read_events(RunDir(tmp_path / run).events(0)) if event["type"] == "step"]
        for run in ("whole", "adapted")
    }
    assert losses["whole"][-1] < 0.2 * losses["whole"][0]
    assert losses["adapted"][0] < 0.2 * losses["whole"][0], "it begins with what was learnt"
