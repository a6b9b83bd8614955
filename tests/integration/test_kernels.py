"""`kernels=auto` in whole runs: the choice is written to the run folder, and a resumed run keeps it."""

import json
import shutil

import pytest

from trainspec_cli.recipe.keys.kernels import TORCH, KernelFigure, KernelSpec, KernelTable
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.tools import table_path
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

RECIPE = ("recipe=tiny", "train.max_steps=6", "checkpoint.interval_steps=3", "sample.max_new_tokens=0", "kernels=auto")


def chosen_table(**chosen: str) -> KernelTable:
    figures = {
        op: {TORCH: KernelFigure("default", ratio=1.0), backend: KernelFigure("chosen", ratio=0.5)}
        for op, backend in chosen.items()
    }
    return KernelTable("made up", "fp32", "2.13", figures=figures)


@pytest.fixture
def remember(environment, monkeypatch):
    """Puts a table where the launch of RECIPE will look for it."""
    monkeypatch.setenv("TRAINSPEC_CACHE", environment["TRAINSPEC_CACHE"])
    loaded = load(RECIPE)
    machine = this_machine(loaded.spec)
    path = table_path(plan_on(loaded, machine), machine)
    yield lambda **chosen: write_json(path, to_plain(chosen_table(**chosen)))
    path.unlink(missing_ok=True)


@pytest.mark.slow
def test_the_choice_stands_in_the_run_folder_and_a_resumed_run_keeps_it(trainspec, tmp_path, read_result, remember):
    remember(rope="halves", rms_norm="frugal")
    ended = trainspec("launch", *RECIPE, "run.dir=whole")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rms_norm frugal (0.50" in ended.stdout and "rope halves (0.50" in ended.stdout
    chosen = to_plain(KernelSpec(rope="halves", rms_norm="frugal"))
    assert read_json(tmp_path / "whole" / "plan.json")["kernels"] == chosen
    assert read_json(tmp_path / "whole" / "kernels.json")["figures"]["rope"]["halves"]["verdict"] == "chosen"

    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "step_00000006")
    remember(rope="compiled", swiglu="frugal")
    ended = trainspec("resume", "again")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert read_json(tmp_path / "again" / "plan.json")["kernels"] == chosen
    assert read_result("again")["weights_sha256"] == read_result("whole")["weights_sha256"]

    shown = trainspec("report", "again")
    assert "rms_norm frugal (0.50" in shown.stdout
    assert json.loads(trainspec("report", "again", "--json").stdout)["kernels"] == chosen


@pytest.mark.slow
def test_auto_measures_every_operation_of_the_run(trainspec, tmp_path):
    ended = trainspec("launch", *RECIPE, "run.dir=measured")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "measuring kernels" in ended.stdout
    figures = read_json(tmp_path / "measured" / "kernels.json")["figures"]
    assert set(figures) == {"attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy", "adamw"}
    verdicts = [figure["verdict"] for backends in figures.values() for figure in backends.values()]
    assert not {"wrong", "failed"} & set(verdicts)
    kernels = read_json(tmp_path / "measured" / "plan.json")["kernels"]
    assert "auto" not in kernels.values()
    for op, backends in figures.items():
        best = next((name for name, figure in backends.items() if figure["verdict"] == "chosen"), TORCH)
        assert kernels[op] == best
    again = trainspec("launch", *RECIPE, "run.dir=second")
    assert "measuring kernels" not in again.stdout
    assert read_json(tmp_path / "second" / "plan.json")["kernels"] == kernels
