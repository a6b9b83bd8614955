"""`trainspec runs`, `runs compare`, `runs rm` and `runs prune` over run folders that are written event by event."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lab.problems import codes

from trainspec_cli.__main__ import run as trainspec
from trainspec_cli.cli import runs as runs_command
from trainspec_cli.core.errors import EXIT_DONE, RecipeError
from trainspec_cli.run.folder import generations, memory
from trainspec_cli.run.folder.event_types.events import PARTS
from trainspec_cli.run.folder.events import EventWriter, parse_event
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim
from trainspec_cli.session.runs import removal

MakeRun = Callable[..., RunDir]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "MEMORY", tmp_path)
    return tmp_path


@pytest.fixture
def make_run() -> MakeRun:
    """A run below ./runs that ended with `status`; its loss falls from 2 to `loss`."""

    def make(name: str, lr: float = 0.1, loss: float = 1.0, status: str = "done", **spec: Any) -> RunDir:
        run = RunDir(f"runs/tiny/{name}")
        write_json(run.run_json, {"recipe": "tiny", "created_at": time.time() - 86_400.0, "memory_secret": name})
        about = {"train": {"max_steps": 3}, "optim": {"lr": lr, "beta": [0.9, 0.95]}, **spec}
        write_json(run.plan_json, {"spec": about, "num_nodes": 1})
        if status == "made":
            return run
        generations.begin(run)
        writer = EventWriter(run.events(0), 0)
        for step, at in enumerate((2.0, (2.0 + loss) / 2, loss), 1):
            parts = dict.fromkeys(PARTS, 0.1)
            step_event = {"type": "step", "time": 0.0, "step": step, "loss": at, "grad_norm": 1.0, "tokens": 8}
            writer.write(parse_event({**step_event, "step_time_s": 0.1, "time_s": parts, "skipped": False}))
        evaluation = {"type": "eval", "time": 0.0, "step": 3, "heldout_loss": loss + 0.5, "heldout_bits_per_byte": None}
        writer.write(parse_event(evaluation))
        writer.close()
        if status != "killed":
            write_json(run.result_json, {"status": status, "exit_code": 0, "steps": 3})
        for step in (1, 2, 3):
            run.checkpoint(step).mkdir(parents=True)
            (run.checkpoint(step) / "weights").write_bytes(bytes(50_000))
        return run

    return make


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert trainspec(arguments) == EXIT_DONE
    return capsys.readouterr().out


def test_the_list_shows_names_tags_and_what_differs(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", lr=0.1, run={"name": "base", "tags": ["paper"]})
    make_run("b", lr=0.2, run={"name": "", "tags": []})
    lines = {line.split()[-2]: line for line in said(capsys, "runs").splitlines()[1:]}
    assert lines["runs/tiny/a"].split()[1:3] == ["base", "#paper"]
    assert lines["runs/tiny/b"].endswith("optim.lr=0.2"), "what both share, and `run`, is left out"
    (tagged,) = json.loads(said(capsys, "runs", "--tag", "paper", "--json"))
    assert (tagged["path"], tagged["name"], tagged["differs"]) == ("runs/tiny/a", "base", {"optim.lr": 0.1})
    assert json.loads(said(capsys, "runs", "--tag", "none", "--json")) == []


def test_a_run_is_found_by_its_name(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", run={"name": "base"})
    make_run("b", run={"name": "twice"})
    make_run("c", run={"name": "twice"})
    assert json.loads(said(capsys, "report", "base", "--json"))["path"] == "runs/tiny/a"
    for name, code in (("twice", "ambiguous"), ("nobody", "no_run")):
        assert trainspec(["report", name, "--json"]) == RecipeError.exit_code
        assert codes(capsys.readouterr().out) == [(code, "")]


def test_runs_are_compared_in_values_figures_and_curves(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    make_run("a", lr=0.1, loss=1.0)
    make_run("b", lr=0.2, loss=0.5, status="stopped")
    shown = said(capsys, "runs", "compare", "runs/tiny/a", "runs/tiny/b").splitlines()
    assert shown[:2] == ["A  runs/tiny/a", "B  runs/tiny/b"]
    rows = {line.split("  ")[0]: line.split()[-2:] for line in shown if len(line.split()) > 2}
    assert rows["optim.lr"] == ["0.1", "0.2"]
    assert rows["status"] == ["done", "stopped"]
    assert rows["loss"] == ["1.0000", "0.5000"]
    assert "optim.beta" not in rows
    highest = next(line for line in shown if "┤" in line)
    assert highest.split("┤") == ["   2 ", "*"], "both begin at 2"
    compared = json.loads(said(capsys, "runs", "compare", "runs/tiny/a", "runs/tiny/b", "--json"))
    assert [run["values"] for run in compared] == [{"optim.lr": 0.1}, {"optim.lr": 0.2}]
    assert compared[1]["loss_curve"] == [[1, 2.0], [2, 1.25], [3, 0.5]]
    assert (compared[1]["best_heldout_step"], compared[1]["best_heldout_loss"]) == (3, 1.0)
    assert trainspec(["runs", "compare", "runs/tiny/a"]) == RecipeError.exit_code


def test_a_run_is_removed_when_that_is_confirmed(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = make_run("a")
    make_run("b", init={"from": "runs/tiny/a"})
    assert trainspec(["runs", "rm", "runs/tiny/a"]) == RecipeError.exit_code
    asked = capsys.readouterr()
    assert "add --yes" in asked.err and gone.root.is_dir()
    assert "runs/tiny/a  (runs/tiny/b " in asked.out
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr(runs_command.typer, "confirm", lambda text, abort: text)
    said(capsys, "runs", "rm", "runs/tiny/a")
    assert not gone.root.exists() and RunDir("runs/tiny/b").run_json.is_file()
    (removed,) = json.loads(said(capsys, "runs", "rm", "runs/tiny/b", "--yes", "--json"))
    assert removed["bytes"] >= 150_000
    assert not Path("runs/tiny/b").exists()


def test_a_run_that_lives_is_never_removed(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("a", status="killed")
    with claim(run, "launch"):
        assert trainspec(["runs", "rm", "runs/tiny/a", "--yes"]) == RecipeError.exit_code
        assert "runs/tiny/a is running" in capsys.readouterr().err
        assert "nothing to remove" in said(capsys, "runs", "prune", "--yes")
    assert run.run_json.is_file()
    said(capsys, "runs", "prune", "--yes")
    assert not run.root.exists()


def test_pruning_takes_what_failed_or_is_old_enough(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    runs = {status: make_run(status, status=status) for status in ("done", "failed", "killed", "stopped")}
    said(capsys, "runs", "prune", "--older-than", "2", "--yes")
    assert all(run.root.is_dir() for run in runs.values()), "they are a day old"
    said(capsys, "runs", "prune", "--older-than", "0.5", "--yes")
    assert {status for status, run in runs.items() if run.root.is_dir()} == {"done", "stopped"}
    assert trainspec(["runs", "prune", "--status", "running", "--yes"]) == RecipeError.exit_code


def test_a_run_that_waits_for_its_first_start_is_pruned_where_that_is_asked_for(
    make_run: MakeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    waits = make_run("waits", status="made")
    for options in ((), ("--checkpoints",)):
        assert "nothing to remove" in said(capsys, "runs", "prune", "--yes", *options)
    assert waits.run_json.is_file()
    said(capsys, "runs", "prune", "--status", "made", "--yes")
    assert not waits.root.exists()


def test_of_checkpoints_the_newest_and_the_best_stay(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run("a")
    writer = EventWriter(run.events(0), 0)
    writer.write(parse_event({"type": "eval", "time": 0, "step": 1, "heldout_loss": 0.1, "heldout_accuracy": 1.0}))
    writer.close()
    said(capsys, "runs", "prune", "--checkpoints", "--yes")
    assert run.checkpoint_steps() == [1, 3]
    assert "nothing to remove" in said(capsys, "runs", "prune", "--checkpoints", "--yes")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert trainspec(list(arguments)) == RecipeError.exit_code
    return capsys.readouterr().err


def test_a_run_in_whose_folder_another_one_is_stays(make_run: MakeRun, capsys: pytest.CaptureFixture[str]) -> None:
    outer = make_run("outer")
    inner = outer.root / "deep/inner"
    inner.mkdir(parents=True)
    (inner / "run.json").write_text("{}")
    told = refused(capsys, "runs", "rm", str(outer.root), "--yes")
    assert "another run" in told and "deep/inner" in told
    assert outer.run_json.is_file()


def test_the_run_that_somebody_stands_in_stays(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run("here")
    root = run.root.resolve()
    monkeypatch.chdir(root)
    assert "current folder" in refused(capsys, "runs", "rm", ".", "--yes")
    assert (root / "run.json").is_file()


def test_a_run_that_was_started_after_it_was_looked_at_stays(make_run: MakeRun) -> None:
    run = make_run("again")
    (planned,) = removal.plan_removal([str(run.root)])
    generations.begin(run)
    with pytest.raises(RecipeError, match="was started meanwhile"):
        removal.remove(planned)
    assert run.run_json.is_file()


@pytest.mark.parametrize("days", ["nan", "-5", "inf"])
def test_an_age_that_is_none_prunes_nothing(make_run: MakeRun, capsys: pytest.CaptureFixture[str], days: str) -> None:
    run = make_run("a", status="failed")
    assert "--older-than" in refused(capsys, "runs", "prune", "--older-than", days, "--yes")
    assert run.run_json.is_file()
