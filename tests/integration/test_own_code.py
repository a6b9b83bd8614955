"""A whole run with a user-defined source, optimizer, callback and tracker: killed, resumed, and with an error."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from integration.conftest import Trainspec
from lab import own_model
from lab.groups import changes, check_nothing_was_lost, losses, run_events
from lab.waiting import wait_for

from trainspec_cli.run.folder.paths import RunDir

pytestmark = pytest.mark.slow

CODE = """
import torch

def squares(count):
    for number in range(count):
        yield {"text": f"The square of {number} is {number * number}."}

class Momentum(torch.optim.Optimizer):
    def __init__(self, groups, lr, decay=0.9):
        super().__init__(groups, {"lr": lr, "decay": decay})
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["updates"], state["average"] = 0, torch.zeros_like(p)
                state["updates"] += 1
                state["average"].lerp_(p.grad, 1 - group["decay"])
                p.sub_(state["average"], alpha=group["lr"] / state["updates"] ** 0.5)
                FAULT

class Watch:
    every_rank = True
    def __init__(self, run):
        self.file = (run.folder / f"seen{run.rank}.txt").open("a")
    def on_step(self, event):
        torch.rand(1)
        self.file.write(f"{event.step} ")
    def on_end(self, event):
        self.file.write(event.status)
        self.file.close()

class Types:
    def __init__(self, run):
        self.file = (run.folder / "types.txt").open("a")
    def record(self, event):
        self.file.write(f"{event.type} ")
    def close(self):
        self.file.close()
"""
RECIPE = (
    *("recipe=tiny", "data.source=mine.py:squares", "data.options.count=4000", "~data.max_bytes"),
    *("optim.name=mine.py:Momentum", "optim.state_bytes=4", "optim.options.decay=0.8"),
    *("train.callbacks=[mine.py:Watch]", "tracking.trackers=[mine.py:Types]"),
    *("checkpoint.interval_steps=5", "train.max_steps=12", "cluster.devices_per_node=2", "layout.dp_shard=2"),
)


def result(folder: Path) -> dict[str, object]:
    read: dict[str, object] = json.loads((folder / "result.json").read_text())
    return read


@pytest.mark.clause("EXT-2")
def test_a_run_of_ones_own_code_is_the_same_after_a_kill_and_keeps_its_code(
    trainspec: Trainspec, tmp_path: Path
) -> None:
    code = tmp_path / "mine.py"
    code.write_text(CODE.replace("FAULT", ""))
    for run, *more in (("whole",), ("killed", "fault=kill(rank=1,step=7)")):
        ended = trainspec("launch", *RECIPE, f"run.dir={run}", *more)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert f"Momentum of {code}" in ended.stdout + ended.stderr
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert result(whole)["weights_sha256"] == result(killed)["weights_sha256"]
    assert (whole / "seen0.txt").read_text() == (whole / "seen1.txt").read_text()
    assert (whole / "seen0.txt").read_text() == " ".join(map(str, range(1, 13))) + " done"
    assert {"start", "step", "eval", "checkpoint", "end"} <= set((whole / "types.txt").read_text().split())
    kept = json.loads((whole / "code.json").read_text())["files"][str(code)]
    assert set(kept["keys"]) == {"data.source", "optim.name", "train.callbacks", "tracking.trackers"}
    assert (whole / "code" / kept["copy"]).read_text() == code.read_text()

    code.write_text(CODE.replace("FAULT", 'if state["updates"] > 13: raise ValueError("enough")'))
    (tmp_path / "elsewhere").mkdir()
    ended = trainspec("resume", "whole", "train.max_steps=+4")
    said = ended.stdout + ended.stderr
    assert ended.returncode == 5, said
    assert f"{code} has changed" in said
    line = 1 + CODE.splitlines().index(" " * 16 + "FAULT")
    assert "ValueError: enough" in said and f"({code}:{line}, in step: if" in said
    assert "Traceback" not in said


MODEL = (
    *("recipe=tiny", "model=own", "model.block=model.py:Averager", "model.hidden_size=64", "model.vocab_size=300"),
    *("train.loss=model.py:smoothed", "train.loss_options.smoothing=0.2"),
    *("data.tokenizer.code=tokens.py:Bytes", "sample.prompt=def", "sample.max_new_tokens=8"),
    *("checkpoint.interval_steps=5", "train.max_steps=12", "precision=fp32"),
)
TWO = ("cluster.devices_per_node=2", "layout.dp_shard=2")
TOKENS = """
class Bytes:
    vocab_size, end_of_document = 257, 256
    def encode(self, text):
        return list(text.encode())
    def decode(self, ids):
        return "written: " + bytes(one for one in ids if one < 256).decode(errors="replace")
"""


def test_a_model_a_loss_and_a_tokenizer_of_ones_own_are_trained_in_every_layout_and_resumed_to_the_bit(
    trainspec: Trainspec, tmp_path: Path
) -> None:
    code = tmp_path / "model.py"
    code.write_text(Path(own_model.__file__).read_text(encoding="utf-8"))
    (tmp_path / "tokens.py").write_text(TOKENS)
    ended = trainspec("launch", *MODEL, "model.block_params=100", "run.dir=wrong")
    said = ended.stdout + ended.stderr
    assert (ended.returncode, result(tmp_path / "wrong")["exit_code"]) == (2, 2), said
    assert f"model.block_params={own_model.BLOCK_PARAMS}" in said
    assert "Traceback" not in said

    right = (*MODEL, f"model.block_params={own_model.BLOCK_PARAMS}")
    layouts = {"one": ("cluster.devices_per_node=1",), "zero": TWO, "pp": (TWO[0], "layout.pp=2")}
    for run, layout in layouts.items():
        ended = trainspec("launch", *right, *layout, f"run.dir={run}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
    losses = [result(tmp_path / run)["final_loss"] for run in layouts]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    kept = json.loads((tmp_path / "zero" / "code.json").read_text())["files"][str(code)]
    assert set(kept["keys"]) == {"model.block", "train.loss"}
    events = map(json.loads, (tmp_path / "zero" / "events" / "rank00000.jsonl").read_text().splitlines())
    assert [event["text"][:9] for event in events if event["type"] == "sample"] == ["written: "]

    ended = trainspec("launch", *right, *TWO, "run.dir=killed", "fault=kill(rank=1,step=7)")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert result(tmp_path / "killed")["weights_sha256"] == result(tmp_path / "zero")["weights_sha256"]


GROUPS = (
    *("recipe=tiny", "resilience=elastic", "optim.schedule.kind=constant", "resilience.exchange_timeout_s=20"),
    *("resilience.heartbeat_timeout_s=10", "resilience.sdc_check=1"),
    *("data.source=mine.py:squares", "data.options.count=4000", "~data.max_bytes"),
    *("optim.name=mine.py:Momentum", "optim.state_bytes=4", "train.callbacks=[mine.py:Watch]"),
    "tracking.trackers=[mine.py:Types]",
)


@pytest.mark.parametrize("group", [0, 1])
def test_a_group_that_dies_heals_with_the_state_of_ones_own_optimizer(
    start_trainspec, trainspec: Trainspec, tmp_path: Path, group: int
) -> None:
    """Group 0 leads, and its death lets the callbacks go on in the other."""
    flushed = CODE.replace('self.file.write(f"{event.step} ")', "print(event.step, file=self.file, flush=True)")
    (tmp_path / "mine.py").write_text(flushed.replace("every_rank = True", "").replace("FAULT", ""))
    slow = f"fault=kill(group={group},step=5); slow(group={1 - group},step=6,seconds=0.2,steps=10000)"
    process = start_trainspec("launch", *GROUPS, "train.max_steps=1000000", "run.dir=run", slow)
    run = RunDir(tmp_path / "run")
    wait_for(lambda: ("joined", group) in changes(run), process)
    joined = run_events(run, "recovery")[-1]["step"]
    wait_for(lambda: max(losses(run)) >= joined + 5, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    check_nothing_was_lost(run, may_lack_notes=True)
    steps = max(losses(run))
    seen = [int(word) for word in (run.root / "seen0.txt").read_text().replace("stopped", " ").split()]
    assert sorted(set(seen)) == list(range(1, steps + 1)), "each step is reported"
    ended = trainspec("launch", *GROUPS, f"train.max_steps={steps}", "run.dir=unharmed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    if group == 1:  # a sum of two is the same in either order; the steps made alone are those of the other group
        assert losses(run) == losses(RunDir(tmp_path / "unharmed"))
