"""`trainspec_cli.attach`: killed scripts resume to the bit, and scripts end on request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from lab.other_frameworks import NOT_IN_CI

from trainspec_cli.run.folder.event_types.events import (
    CheckpointEvent,
    DirectiveEvent,
    EvalEvent,
    StartEvent,
    StepEvent,
)
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir

SCRIPTS = Path(__file__).parents[1] / "lab" / "own_commands"
RANKS = {"plain": 1, "own_loader": 1, "accelerated": 1, "ddp": 2, "fsdp2": 2}
EPOCHS = 5
STEPS = {kind: EPOCHS * (7 if kind == "own_loader" else 6) for kind in RANKS}
"""50 samples in batches of 8; a user-defined loader also returns the last, smaller batch."""


def command(kind: str, folder: Path, *more: str, script: str = "attached.py") -> list[str]:
    folder.mkdir(exist_ok=True)
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS[kind])) if RANKS[kind] > 1 else ()
    return [sys.executable, *torchrun, str(SCRIPTS / script), kind, str(folder), *more]


def taken(folder: Path, rank: int) -> dict[str, str]:
    """The samples of each step, as they were taken last."""
    lines = (folder / f"samples{rank}.txt").read_text().splitlines()
    return dict(line.split(" ", 1) for line in lines)


def assert_same(kind: str, one: Path, other: Path) -> None:
    import torch

    weights, others = torch.load(one / "weights.pt"), torch.load(other / "weights.pt")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: tensor.tolist() for name, tensor in others.items()
    }
    for rank in range(RANKS[kind]):
        assert taken(one, rank) == taken(other, rank)
        assert len(taken(one, rank)) == STEPS[kind]


def of_kind(run: RunDir, kind: type) -> list:
    return [event for event in read_log(run.events(0)) if isinstance(event, kind)]


@pytest.fixture(scope="module")
def undisturbed_script(tmp_path_factory, environment) -> Callable[[str], tuple[Path, RunDir]]:
    """undisturbed_script(kind): the folder and the run of a script of this kind that trains to its end, once per kind;
    the kind "shares" is that of `shares_command` with one rank."""

    @cache
    def train(kind: str) -> tuple[Path, RunDir]:
        place = tmp_path_factory.mktemp(kind)
        shares = kind == "shares"
        words = shares_command(place / "script", 1, 4, 0) if shares else command(kind, place / "script", str(EPOCHS))
        run = [sys.executable, "-m", "trainspec_cli", "run", "--dir", "run", "--", *words]
        ended = subprocess.run(run, cwd=place, env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return place / "script", RunDir(place / "run")

    return train


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANKS)
def test_a_killed_script_goes_on_to_the_bit(
    trainspec, start_trainspec, tmp_path, read_result, wait_for_step, undisturbed_script, kind
):
    if kind == "accelerated":
        pytest.importorskip("accelerate")
    folder, whole = undisturbed_script(kind)
    process = start_trainspec("run", "--dir", "run", "--", *command(kind, tmp_path / "k", str(EPOCHS), "0.05"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 12, process)
    os.kill(of_kind(run, StartEvent)[-1].pid, signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    result = read_result("run")
    assert (result["status"], len(result["recoveries"])) == ("done", 1)
    starts = of_kind(run, StartEvent)
    assert starts[0].step == 0 and starts[-1].step >= 10 and starts[-1].step % 5 == 0
    assert starts[-1].restored_from.endswith(f"step_{starts[-1].step:08d}")
    assert_same(kind, folder, tmp_path / "k")
    losses = {event.step: event.loss for event in of_kind(run, StepEvent)}
    assert losses == {event.step: event.loss for event in of_kind(whole, StepEvent)}
    assert set(losses) == set(range(1, STEPS[kind] + 1)) and all(losses.values())
    assert of_kind(run, CheckpointEvent)[-1].step == of_kind(run, EvalEvent)[-1].step == STEPS[kind]
    told = trainspec("report", "run")
    assert told.returncode == 0 and "held-out" in told.stdout.lower(), told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "ddp"])
def test_a_stopped_script_saves_and_a_later_run_goes_on(
    trainspec, start_trainspec, tmp_path, read_result, wait_for_step, undisturbed_script, kind
):
    process = start_trainspec("run", "--dir", "run", "--", *command(kind, tmp_path / "k", str(EPOCHS), "0.5"))
    wait_for_step(RunDir(tmp_path / "run"), 7, process)
    assert trainspec("stop", "run").returncode == 0
    said = process.communicate()[0]
    assert process.returncode == 6 and said.count("stopped") >= RANKS[kind], said
    step = of_kind(RunDir(tmp_path / "run"), CheckpointEvent)[-1].step
    assert 7 <= step < STEPS[kind]
    assert {len(taken(tmp_path / "k", rank)) for rank in range(RANKS[kind])} == {step}
    result = read_result("run")
    assert (result["status"], result["exit_code"]) == ("stopped", 0)
    on = trainspec("run", "--dir", "on", "--", *command(kind, tmp_path / "k", str(EPOCHS)))
    assert on.returncode == 0 and f"trained {STEPS[kind]}" in on.stdout, on.stdout + on.stderr
    assert_same(kind, undisturbed_script(kind)[0], tmp_path / "k")


@pytest.mark.slow
def test_a_stopped_run_is_resumed_from_the_checkpoints_in_its_folder(
    trainspec, start_trainspec, tmp_path, read_result, wait_for_step
):
    script = (
        "import time, torch\nfrom trainspec_cli import attach\nmodel = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\njob = attach()\n"
        "for batch in job.steps(torch.ones(40, 2, 8), model=model, optimizer=optimizer, every=10):\n"
        "    model(batch).square().mean().backward()\n    optimizer.step()\n    time.sleep(0.05)\n"
    )
    (tmp_path / "mine.py").write_text(script)
    process = start_trainspec("run", "--dir", "run", "--max-restarts", "1", "--", sys.executable, "mine.py")
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6 and "trainspec resume run" in said, said
    saved = of_kind(run, CheckpointEvent)[-1].step
    assert 5 <= saved < 40
    assert trainspec("resume", "run", "optim.lr=1").returncode == 2, "a command has no keys"
    resumed = trainspec("resume", "run")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert of_kind(run, StartEvent)[-1].step == saved
    assert (read_result("run")["status"], read_result("run")["steps"]) == ("done", 40)
    done = trainspec("resume", "run")
    assert done.returncode == 2 and "is done" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["transformers", "lightning"])
def test_a_trainer_is_counted_and_stops(start_trainspec, tmp_path, read_result, wait_for_step, framework):
    pytest.importorskip(framework, reason=f"{framework} {NOT_IN_CI}")
    script = [sys.executable, str(SCRIPTS / "attached_trainers.py"), framework]
    process = start_trainspec("run", "--dir", "run", "--", *script)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    made = [event.step for event in of_kind(run, StepEvent)]
    assert made == list(range(1, made[-1] + 1)) and made[-1] >= 5
    assert all(event.loss is not None for event in of_kind(run, StepEvent))
    assert of_kind(run, EvalEvent)
    assert f"saved at step {made[-1]}" in said
    assert read_result("run")["status"] == "stopped"


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["jax", "tensorflow"])
def test_one_line_counts_the_steps_of_others(start_trainspec, tmp_path, wait_for_step, framework):
    pytest.importorskip(framework, reason=f"{framework} {NOT_IN_CI}")
    script = [sys.executable, str(SCRIPTS / "attached_others.py"), framework]
    process = start_trainspec("run", "--dir", "run", "--", *script)
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 5, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6 and "saved at step" in said, said
    assert [event.loss is not None for event in of_kind(run, StepEvent)][:5] == [True] * 5


def shares_command(folder: Path, ranks: int, epochs: int, largest: int) -> list[str]:
    folder.mkdir(exist_ok=True)
    script = [str(SCRIPTS / "attached_shares.py"), str(folder), str(epochs), str(largest)]
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *script]


def samples_of_steps(folder: Path) -> dict[int, list[str]]:
    """The samples of each step in the order of the ranks, as it was made last."""
    found: dict[int, dict[int, list[str]]] = {}
    for file in sorted(folder.glob("samples*.txt"), key=lambda file: file.stat().st_mtime_ns):
        rank = int(file.stem.removeprefix("samples").partition("_")[0])
        for line in file.read_text().splitlines():
            step, *samples = line.split()
            found.setdefault(int(step), {})[rank] = samples
    return {step: [one for rank in sorted(parts) for one in parts[rank]] for step, parts in found.items()}


def assert_nearly_same(whole: Path, other: Path) -> None:
    """The same samples in the same order; ranks sum their gradients in another order than one rank does."""
    import torch

    assert samples_of_steps(other) == samples_of_steps(whole)
    weights, others = torch.load(whole / "weights.pt"), torch.load(other / "weights.pt")
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_shares_follow_the_ranks_speeds_and_leave_order_and_gradients_as_they_are(
    trainspec, start_trainspec, tmp_path, read_result, wait_for_step, undisturbed_script
):
    whole, _ = undisturbed_script("shares")
    process = start_trainspec("run", "--dir", "run", "--", *shares_command(tmp_path / "s", 2, 4, 12))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 52, process)
    os.kill(of_kind(run, StartEvent)[-1].pid, signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    assert len(read_result("run")["recoveries"]) == 1
    first = next(event for event in read_log(run.directives) if isinstance(event, DirectiveEvent))
    assert first.counts[0] > first.counts[1] and sum(first.counts) == 12 and first.step < 50
    assert "rank 1 " in first.reason
    made = [line.split() for line in (tmp_path / "s" / "samples1_2.txt").read_text().splitlines()]
    assert {len(samples) for step, *samples in made if int(step) <= first.step} == {6}
    assert max(len(samples) for step, *samples in made if int(step) > first.step) < 6, "the later start follows it"
    assert_nearly_same(whole, tmp_path / "s")
    assert "shares" in trainspec("report", "run").stdout


@pytest.mark.slow
def test_a_later_run_goes_on_with_another_number_of_ranks(trainspec, tmp_path, undisturbed_script):
    whole, _ = undisturbed_script("shares")
    for name, ranks, epochs in (("two", 2, 1), ("three", 3, 2), ("one", 1, 4)):
        ran = trainspec("run", "--dir", name, "--", *shares_command(tmp_path / "s", ranks, epochs, 0))
        assert ran.returncode == 0 and f"ended after step {20 * epochs}" in ran.stdout, ran.stdout + ran.stderr
    one = of_kind(RunDir(tmp_path / "one"), StartEvent)[0]
    assert (one.step, one.world_size) == (40, 1) and one.restored_from.endswith("step_00000040")
    assert_nearly_same(whole, tmp_path / "s")


@pytest.mark.slow
def test_a_loader_of_ones_own_keeps_the_number_of_ranks(trainspec, tmp_path):
    assert trainspec("run", "--", *command("own_loader", tmp_path / "k", "1")).returncode == 0
    other = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPTS / "attached.py")]
    text = (SCRIPTS / "attached.py").read_text().replace('if KIND in ("ddp"', 'if KIND in ("own_loader", "ddp"')
    (tmp_path / "two.py").write_text(text)
    ran = trainspec("run", "--", *other[:-1], "two.py", "own_loader", str(tmp_path / "k"), "2")
    assert ran.returncode == 5
    assert "job.sharded(" in ran.stdout + ran.stderr


def test_outside_of_a_run_it_says_so_and_counts():
    text = (
        "from trainspec_cli import attach\n"
        "run = attach()\n"
        "run.step_done(loss=2.0)\n"
        "print(run.step, run.folder, run.checkpoints, run.is_stopping)"
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.stdout == "1 None None False\n"
    assert ran.stderr.count("`trainspec run`") == 1 and "no checkpoint" in ran.stderr
