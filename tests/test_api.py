"""trainspec from Python: the records are those of the commands."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import trainspec_cli as trainspec
from trainspec_cli.__main__ import run
from trainspec_cli.core.errors import RecipeError, WorkerError
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.plan.json import plan_as_json

GPUS = ("recipe=qwen3_0_6b", "cluster=h100", "cluster.num_nodes=1", "batching.global_batch_size=256")


def test_importing_it_loads_nothing_of_what_it_does() -> None:
    code = "import sys, trainspec_cli; print(*(name for name in sys.modules if name.startswith('trainspec_cli.')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert loaded == []


def test_a_recipe_is_composed_and_a_wrong_one_says_what_to_type() -> None:
    spec = trainspec.compose("recipe=tiny", "optim.lr=0.5")
    assert (spec.optim.lr, spec.train.max_steps) == (0.5, 20)
    with pytest.raises(RecipeError) as refused:
        trainspec.compose("recipe=tiny", "optim.lrr=0.5", "train.max_steps=x")
    first = refused.value.problems[0]
    assert (first.code, first.path) == ("unknown_key", "optim.lrr") and "`optim.lr`" in first.hint
    assert len(refused.value.problems) == 2


def test_a_plan_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    planned = trainspec.plan(*GPUS)
    assert planned.best is not None and planned.best.step_time_s > 0
    assert run(["plan", *GPUS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(plan_as_json(planned)))
    assert trainspec.plan(*GPUS, "cluster.accelerator.memory_gb=1").best is None


@pytest.mark.slow
def test_a_run_is_trained_listed_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(measured_cache))
    trained = trainspec.launch("recipe=tiny", "train.max_steps=4", "run.name=mine")
    assert (trained.status, trained.steps, trained.reason) == ("done", 4, "")
    trained.raise_for_status()
    assert "step 4" not in capsys.readouterr().out, "no terminal, no progress"
    (line,) = trainspec.runs()
    assert (line.name, line.step) == ("mine", 4)
    capsys.readouterr()
    assert run(["report", "--json", "mine"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(to_plain(trainspec.report("mine"))))
    with pytest.raises(RecipeError, match="lrr"):
        trainspec.launch("recipe=tiny", "optim.lrr=1")
    failed = trainspec.launch(
        "recipe=tiny", "train.max_steps=4", "resilience.mode=none", "fault=exception(step=2)", progress=True
    )
    assert (failed.status, failed.exit_code) == ("failed", 5)
    assert "InjectedFault" in failed.reason
    assert "first step" in capsys.readouterr().out.splitlines()
    with pytest.raises(WorkerError) as raised:
        failed.raise_for_status()
    assert raised.value.problems[0].message == failed.reason
