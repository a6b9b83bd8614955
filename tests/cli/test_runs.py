"""`trainspec runs --memory` and `--clear-memory`: what runs keep in this node's memory, and what may go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.__main__ import run as trainspec
from trainspec_cli.cli import runs as runs_command
from trainspec_cli.reporter.runs import RunLine
from trainspec_cli.run.folder import memory
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import claim
from trainspec_cli.run.slurm import commands


@pytest.fixture(autouse=True)
def host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(memory, "MEMORY", folder)
    return folder


def make_run(root: Path, step: int, **result: Any) -> RunDir:
    """One with a copy of `step` in memory, that ended with `result`."""
    run = RunDir(root)
    write_json(run.run_json, {"created_at": 1.0, "recipe": "tiny", memory.SECRET: memory.new_secret()})
    slot = memory.make_memory_folder(run) / "slot0"
    write_json(slot / "rank00000.json", {"about": {"step": step}})
    (slot / "rank00000.safetensors").write_bytes(bytes(100_000))
    if result:
        write_json(run.result_json, result)
    return run


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, dict[str, Any]]:
    """Return the copies that `runs` lists, by the name of their run."""
    assert trainspec(["runs", *options, "--json"]) == 0
    return {Path(row["run"] or "").name: row for row in json.loads(capsys.readouterr().out)}


def test_copies_are_listed_with_their_size_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "failed", 6, status="failed")
    row = listed(capsys, "--memory")["failed"]
    assert (row["run"], row["status"], row["step"], row["cleared"]) == (str(tmp_path / "failed"), "failed", 6, False)
    assert row["bytes"] >= 100_000
    assert trainspec(["runs", "--memory"]) == 0
    heading, line, _, hint = capsys.readouterr().out.splitlines()
    assert heading.split() == ["size", "step", "on", "disk", "status", "run"]
    assert line.split()[2:] == ["6", "-", "failed", str(tmp_path / "failed")]
    assert hint.startswith("trainspec runs --clear-memory ")


def test_copies_of_a_running_run_and_of_nobody_knows_whom_stay(
    tmp_path: Path, host_memory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running, failed, gone = (make_run(tmp_path / name, 6) for name in ("running", "failed", "gone"))
    write_json(failed.result_json, {"status": "failed"})
    folders = {run.root.name: memory.memory_folder(run) for run in (running, failed, gone)}
    gone.run_json.unlink()
    (host_memory / "trainspec-unknown").mkdir()
    with claim(running, "launch"):
        rows = listed(capsys, "--clear-memory")
    assert {name: (row["status"], row["cleared"]) for name, row in rows.items()} == {
        "running": ("running", False),
        "failed": ("failed", True),
        "gone": ("gone", True),
        "": ("unknown", False),
    }
    assert {name: folder.exists() for name, folder in folders.items()} == {
        "running": True,
        "failed": False,
        "gone": False,
    }
    assert (host_memory / "trainspec-unknown").exists()


def test_copies_of_a_queued_run_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "queued", 6, status="stopped")
    write_json(run.slurm_json, {"job_id": "7"})
    monkeypatch.setattr(commands, "pending", lambda: frozenset({"7"}))
    row = listed(capsys, "--clear-memory")["queued"]
    assert (row["status"], row["cleared"]) == ("queued", False)
    assert memory.memory_folder(run).exists()


def test_without_copies_there_is_nothing_to_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert trainspec(["runs", "--clear-memory"]) == 0
    assert capsys.readouterr().out.startswith("no run ")


def test_runs_are_a_table_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        RunLine("runs/tiny/2", "tiny", "running", 7, 20, 1.23456, created_at=910.0),
        RunLine("runs/q/1", "quickstart", "damaged", 0, None, None, created_at=2000.0, damage="plan.json: torn"),
    ]
    monkeypatch.setattr(runs_command, "runs_here", lambda: lines)
    monkeypatch.setattr("time.time", lambda: 1000.0)
    assert trainspec(["runs"]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [
        "recipe      status   step  loss    age         path",
        "tiny        running  7/20  1.2346  1 min 30 s  runs/tiny/2",
        "quickstart  damaged  0     -       0 ms        runs/q/1",
    ]
    assert captured.err == "damaged: plan.json: torn\n"
    assert trainspec(["runs", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(line["path"], line["loss"], line["damage"]) for line in shown] == [
        ("runs/tiny/2", 1.23456, ""),
        ("runs/q/1", None, "plan.json: torn"),
    ]


def test_without_runs_there_is_something_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert trainspec(["runs"]) == 0
    assert capsys.readouterr().out.startswith("there are no runs")


@pytest.mark.parametrize(
    ("status", "goes"),
    [("done", True), ("stopped", True), ("failed", True), ("killed", True), ("made", True), ("running", False),
     ("queued", False), ("damaged", False)],
)  # fmt: skip
def test_copies_go_with_runs_that_will_not_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], status: str, goes: bool
) -> None:
    run = make_run(tmp_path / "run", 6)
    monkeypatch.setattr(runs_command, "status_of_run", lambda run: status)
    assert trainspec(["runs", "--memory"]) == 0
    assert ("--clear-memory removes" in capsys.readouterr().out) == goes
    assert memory.memory_folder(run).exists(), "listing removes nothing"
    assert trainspec(["runs", "--clear-memory"]) == 0
    assert ("cleared 0 B" in capsys.readouterr().out) != goes
    assert memory.memory_folder(run).exists() != goes


def test_copies_stand_beside_the_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", 6, status="failed")
    write_json(run.checkpoint(4) / "manifest.json", {})
    assert trainspec(["runs", "--memory"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[2:5] == ["6", "4", "failed"]
