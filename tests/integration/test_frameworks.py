"""`trainspec run` with scripts of eight kinds, each as its framework's users write it: steps counted exactly, exit
codes kept, killed ranks made good from the script's own checkpoints, and hangs named.

A framework that is not installed together with trainspec is looked for in the Python that PYTHON_DEEPSPEED,
PYTHON_LIGHTNING, PYTHON_TENSORFLOW or PYTHON_JAX names.
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest
from lab.other_frameworks import python_with
from lab.waiting import wait_for

from trainspec_cli.run.folder.event_types.events import HangEvent, StartEvent, StepEvent
from trainspec_cli.run.folder.events import read_log
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.wings.own_script import journal as progress

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "lab" / "own_commands"
FRAMEWORKS = SCRIPTS / "frameworks"


@dataclass(frozen=True)
class Kind:
    """A script, what starts it, and what its command ends with where its ranks exit with 3."""

    script: Path
    package: str
    starts: str = "torchrun"
    exit_code: int = 1
    attached: bool = False


KINDS = {
    "ddp": Kind(SCRIPTS / "ddp.py", "torch"),
    "fsdp2": Kind(FRAMEWORKS / "fsdp2.py", "torch"),
    "trainer": Kind(FRAMEWORKS / "trainer.py", "transformers"),
    "accelerate": Kind(FRAMEWORKS / "accelerated.py", "accelerate"),
    "deepspeed": Kind(FRAMEWORKS / "deepspeed_zero2.py", "deepspeed"),
    "lightning": Kind(FRAMEWORKS / "lightning_fit.py", "lightning", "itself", 3),
    "tensorflow": Kind(FRAMEWORKS / "tensorflow_workers.py", "tensorflow", "workers", 3, attached=True),
    "jax": Kind(FRAMEWORKS / "jax_workers.py", "jax", "workers", 3, attached=True),
}
UNCOUNTED = [name for name, kind in KINDS.items() if kind.attached]


def hangs(kind: Kind) -> list[str]:
    """TensorFlow itself ends within about ten seconds where a process sends no heartbeats."""
    return ["--hang-s", "4" if kind.package == "tensorflow" else "10", "--max-restarts", "0"]


@pytest.fixture(params=KINDS)
def kind(request) -> Kind:
    return KINDS[request.param]


@pytest.fixture(params=UNCOUNTED)
def uncounted(request) -> Kind:
    return replace(KINDS[request.param], attached=False)


def command(kind: Kind, *arguments: str, place: str = "") -> list[str]:
    python = python_with(kind.package)
    script = [str(kind.script), *arguments]
    starts = {
        "torchrun": [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script],
        "workers": [python, str(FRAMEWORKS / "workers.py"), python, *script],
        "itself": [python, *script],
    }
    variables = [f"PLACE={place}", f"ATTACH={'1' if kind.attached else ''}", "DS_ACCELERATOR=cpu"]
    return ["--", "env", *variables, *starts[kind.starts]]


def steps_of(run: RunDir, rank: int = 0) -> list[int]:
    return [event.step for event in read_log(run.events(rank)) if isinstance(event, StepEvent)]


def pids_of(run: RunDir) -> dict[int, int]:
    """The processes of the newest start that train, by rank."""
    folder = max((run.root / "progress").iterdir())
    found = (progress.StepFile(path).read()[0] for path in progress.step_files(folder))
    return {one.rank or 0: one.pid for one in found if one}


def test_steps_of_each_rank_are_counted_exactly(trainspec, tmp_path, read_result, kind):
    ran = trainspec("run", "--dir", "run", *command(kind, "12"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result = read_result("run")
    assert (result["status"], result["steps"], result["exit_code"]) == ("done", 12, 0)
    run = RunDir(tmp_path / "run")
    assert [steps_of(run, rank) for rank in (0, 1)] == [list(range(1, 13))] * 2
    starts = [event for event in read_log(run.events(1)) if isinstance(event, StartEvent)]
    assert [(event.step, event.world_size) for event in starts] == [(0, 2)]
    if kind.starts == "torchrun":
        assert "docs/security.md" in ran.stdout, "torchrun opens a port on all networks"
        assert len(list(run.logs.glob("launch_01/ranks/*/attempt_0/*/stderr.log"))) == 2


def test_the_commands_exit_code_is_kept(trainspec, read_result, kind):
    ran = trainspec("run", "--dir", "run", "--max-restarts", "0", *command(kind, "60", place="ends"))
    assert ran.returncode == 5, ran.stdout + ran.stderr
    result = read_result("run")
    assert (result["status"], result["steps"], result["exit_code"]) == ("failed", 10, kind.exit_code)


def test_a_killed_rank_is_made_good_from_the_scripts_own_checkpoint(
    start_trainspec, tmp_path, read_result, wait_for_step, kind
):
    process = start_trainspec("run", "--dir", "run", *command(kind, "40", "0.2"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, process)
    os.kill(pids_of(run)[1], signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    result = read_result("run")
    assert (result["status"], result["steps"]) == ("done", 40)
    (recovery,) = result["recoveries"]
    assert recovery["kind"] == "restart" and recovery["step"] >= 10, said
    made = steps_of(run)
    assert made[-1] == 40 and set(made) == set(range(1, 41))
    assert len(made) <= (41 if kind.package == "torch" else 42), "at most the step of the kill is made again"


def test_a_stopped_rank_is_named(start_trainspec, tmp_path, read_result, wait_for_step, kind):
    process = start_trainspec("run", "--dir", "run", *hangs(kind), *command(kind, "4000", "0.05"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, process)
    pids = pids_of(run)
    os.kill(pids[1], signal.SIGSTOP)
    said = " ".join(process.communicate()[0].split())
    assert process.returncode == 5, said
    assert "rank 1: it" in said and "not respond" in said
    assert "rank 1 (" in said and kind.script.name in said
    assert read_result("run")["status"] == "failed"
    hung = [event for event in read_log(run.events(1)) if isinstance(event, HangEvent)]
    assert kind.script.name in hung[0].stack
    wait_for(lambda: not any(map(psutil.pid_exists, pids.values())))


def test_a_skipped_exchange_is_named(trainspec, kind):
    ran = trainspec("run", "--dir", "run", *hangs(kind), *command(kind, "4000", "0.02", place="skip"))
    said = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == 5, said
    if kind.package == "tensorflow":
        assert "rank 1: it" in said and "in no collective" in said and "train_step" not in said.partition("rank 1 (")[2]
        return
    assert "different exchanges: rank 0" in said and "rank 1 waits in" in said
    assert said.count(f"{kind.script.name}:") >= 2 and f"called at {kind.script.name}:" in said
    found = json.loads(trainspec("diagnose", "run", "--json").stdout)["verdicts"]
    assert "hang" in {verdict["cause"] for verdict in found}


def test_without_the_line_that_counts_it_is_started_again_once_it_has_worked(
    start_trainspec, tmp_path, read_result, uncounted
):
    process = start_trainspec("run", "--dir", "run", "--work-s", "0", *command(uncounted, "40", "0.2"))
    saved = tmp_path / ("checkpoint.npz" if uncounted.package == "jax" else "checkpoints")
    wait_for(saved.exists)
    trainers = [one for one in psutil.Process(process.pid).children(recursive=True) if "WORKER" in one.environ()]
    os.kill(max(one.pid for one in trainers), signal.SIGKILL)
    said = process.communicate()[0]
    assert process.returncode == 0, said
    result = read_result("run")
    assert (result["status"], result["steps"], result["exit_code"]) == ("done", 0, 0)
    assert len(list((tmp_path / "run" / "generations").iterdir())) == 2


def test_without_the_line_that_counts_a_stopped_process_is_named(start_trainspec, tmp_path, uncounted):
    process = start_trainspec("run", "--dir", "run", *hangs(uncounted), *command(uncounted, "4000", "0.05"))
    saved = tmp_path / ("checkpoint.npz" if uncounted.package == "jax" else "checkpoints")
    wait_for(saved.exists)
    trainers = [one for one in psutil.Process(process.pid).children(recursive=True) if "WORKER" in one.environ()]
    stopped = max(one.pid for one in trainers)
    os.kill(stopped, signal.SIGSTOP)
    said = " ".join(process.communicate()[0].split())
    assert process.returncode == 5, said
    assert "no activity for" in said and f"process {stopped} (" in said and "is stopped" in said
    assert not psutil.pid_exists(stopped)


@pytest.mark.parametrize("name", UNCOUNTED)
def test_ranks_without_torch_end_after_the_same_step(start_trainspec, tmp_path, wait_for_step, name):
    kind = KINDS[name]
    process = start_trainspec("run", "--dir", "run", *command(kind, "4000", "0.05"))
    run = RunDir(tmp_path / "run")
    wait_for_step(run, 10, process)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[0]
    assert process.returncode == 6, said
    (last,) = {steps_of(run, rank)[-1] for rank in (0, 1)}
    assert said.count(f"ends after step {last}") == 2 and last >= 10
