"""A rank that stands still is named within seconds, with what it has not called, and the run ends in time."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from trainspec_cli.run.backend.processes import rank_of
from trainspec_cli.run.folder.event_types.events import StepEvent, VerdictEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir

NAMED_S = 15.0
"""A hang is named within this many seconds."""


def verdicts_of(run: RunDir) -> list[VerdictEvent]:
    return [event for event in read_log(run.verdicts) if isinstance(event, VerdictEvent)]


def require_named_in_time(run: RunDir, ranks: int, late: int | None, *facts: str) -> VerdictEvent:
    """The first verdict on the run was shown in time."""
    stepped = max(one.time for rank in range(ranks) for one in read_log(run.events(rank)) if isinstance(one, StepEvent))
    shown = verdicts_of(run)[0]
    assert (shown.verdict.cause, shown.verdict.rank) == ("hang", late)
    assert shown.time - stepped < NAMED_S
    assert all(fact in shown.verdict.evidence[1] for fact in facts), shown.verdict.evidence
    return shown


def require_same_afterwards(trainspec: Any, run: RunDir, shown: VerdictEvent) -> None:
    """The verdict on the ended run, and its error, say what was shown while it ran."""
    found = json.loads(trainspec("diagnose", str(run.root), "--json").stdout)["verdicts"][0]
    about = shown.verdict
    assert (found["cause"], found["rank"], found["evidence"][1:]) == ("hang", about.rank, list(about.evidence[1:]))
    (error,) = [json.loads(path.read_text()) for path in run.errors_folder.glob("rank*.json")]
    assert error["code"] == "hang" and about.evidence[1] in error["message"]


@pytest.mark.slow
def test_a_stopped_rank_is_named_and_the_run_ends(
    wait_for_step, workers_of, start_trainspec, trainspec, tmp_path, read_result
):
    recipe = (
        "recipe=tiny",
        "train.max_steps=4000",
        "resilience.hang_floor_s=20",
        "resilience.mode=none",
        "checkpoint.interval_steps=5",
    )
    process = start_trainspec("launch", *recipe, "run.dir=hung")
    run_dir = RunDir(tmp_path / "hung")
    wait_for_step(run_dir, 10, process)
    stopped = next(worker for worker in workers_of(process) if rank_of(worker) == 1)
    stopped.send_signal(signal.SIGSTOP)
    said = " ".join(process.communicate()[0].split())
    assert process.returncode == 5, said
    late = "rank 1 is late: it does not respond; the other ranks wait in "
    assert any(f"{late}{where}" in said for where in ("gloo:", "sums of gradients")), said
    assert "rank 0 (" in said
    assert "train_step" in said, "rank 0's stack"
    assert read_result("hung")["status"] == "failed"
    told = json.loads(run_dir.error(0).read_text())
    assert (told["code"], told["rank"]) == ("hang", 0)
    assert not stopped.is_running() or stopped.status() == psutil.STATUS_ZOMBIE, "nothing is left behind"
    require_same_afterwards(trainspec, run_dir, require_named_in_time(run_dir, 2, 1, "it does not respond"))


SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters())

def load():
    while True:
        time.sleep(1)

def odd(case):
    if case == "other":
        dist.broadcast(torch.ones(8, 4), 0)
    elif case == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif case == "data":
        load()
    elif case == "save":  # a checkpoint that takes longer than a hang takes to be suspected, and is written
        with open("saved", "wb") as file:
            for _ in range(36):
                file.write(os.urandom(2**20))
                time.sleep(0.5)

for step in range(12):
    time.sleep(0.02)
    model(torch.ones(2, 4)).sum().backward()
    if (step, rank) == (6, 1):
        odd(sys.argv[1])
    if (step, rank, sys.argv[1]) != (6, 1, "other"):
        dist.all_reduce(torch.ones(8, 4))
    dist.barrier()
    optimizer.step()
    optimizer.zero_grad()
"""


def run_script(trainspec: Any, tmp_path: Path, case: str, hang_s: int) -> RunDir:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    torchrun = ("torchrun", "--nproc-per-node=3", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
    ended = trainspec(
        *("run", "--dir=hung", "--max-restarts=0", f"--hang-s={hang_s}", "--", *torchrun, str(script), case)
    )
    assert ended.returncode == (0 if case == "save" else 5), ended.stdout + ended.stderr
    return RunDir(tmp_path / "hung")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "facts"),
    [
        ("other", ("broadcast of 8x4 at train.py:", "in odd; ranks 0, 2 called gloo:all_reduce of 8x4 at train.py:")),
        ("data", ("in load", "it has not called number", "gloo:all_reduce of 8x4 at train.py:")),
        ("stop", ("it does not respond",)),
    ],
)
def test_a_scripts_rank_is_named_with_the_collective_and_the_line(trainspec, tmp_path, case, facts):
    run = run_script(trainspec, tmp_path, case, hang_s=25)
    shown = require_named_in_time(run, 3, 1, *facts)
    if case != "stop":  # such a rank runs for a moment at the end, so that its stack can be read
        assert len(verdicts_of(run)) == 1
        require_same_afterwards(trainspec, run, shown)


@pytest.mark.slow
def test_a_long_checkpoint_of_a_script_is_no_hang(trainspec, tmp_path):
    run = run_script(trainspec, tmp_path, "save", hang_s=600)
    assert not run.verdicts.exists() or verdicts_of(run) == []
