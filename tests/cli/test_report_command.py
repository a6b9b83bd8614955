"""`trainspec report` and `trainspec diagnose` on run folders that are written event by event."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from lab.events import started, stepped, write_event
from lab.pages import assert_alone

from trainspec_cli.__main__ import run as trainspec
from trainspec_cli.run.folder.event_types.events import EvalEvent
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.runs import diagnose


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run of two steps below ./runs, named first."""
    monkeypatch.chdir(tmp_path)
    run = RunDir("runs/tiny/one")
    write_json(run.run_json, {"recipe": "tiny", "created_at": 1000.0})
    write_json(run.plan_json, {"spec": {"train": {"max_steps": 2}, "run": {"name": "first"}}, "num_nodes": 1})
    write_json(run.result_json, {"status": "done", "exit_code": 0})
    run.composed_yaml.write_text("model: tiny  # <here>\n")
    for event in (started(), stepped(1), stepped(2)):
        write_event(run.events(0), event)
    return run


def test_a_report_writes_a_page_beside_what_it_prints(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainspec(["report", "first", "--json", "--html", "page.html"]) == 0
    report, page = json.loads(capsys.readouterr().out), Path("page.html").read_text(encoding="utf-8")
    assert_alone(page)
    assert "<title>first: done</title>" in page and "tiny  # &lt;here&gt;" in page
    assert report["name"] == "first" and f"<b>{report['final_loss']:.4f}</b>" in page
    assert re.search(r"\d{4}-\d\d-\d\d, trainspec [\d.]+: <code>", page)


def test_all_curves_are_one_table(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    write_event(run.events(0), EvalEvent(step=2, heldout_loss=1.5, heldout_accuracy=0.25))
    write_event(run.events(0), replace(stepped(3), lr=2e-4))
    assert trainspec(["report", "first", "--csv", "curves.csv", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    with Path("curves.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [tuple(point) for point in report["loss"]]
    assert [row["lr"] for row in rows] == ["", "", "0.0002"]
    assert [(row["heldout_loss"], row["heldout_accuracy"]) for row in rows] == [("", ""), ("1.5", "0.25"), ("", "")]
    assert "heldout_dice" not in rows[0]
    assert trainspec(["report", "first", "--csv", "no/curves.csv"]) == 2
    assert "--csv no/curves.csv " in capsys.readouterr().err


def test_a_diagnosis_writes_a_page_of_the_verdicts(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert trainspec(["diagnose", "last", "--html", "page.html"]) == 0
    assert "too few steps" in capsys.readouterr().out
    page = Path("page.html").read_text(encoding="utf-8")
    assert_alone(page)
    assert "of first: done</title>" in page and "Too few steps" in page


@pytest.mark.parametrize("command", ["report", "diagnose"])
def test_a_page_that_cannot_be_written_is_refused(
    run: RunDir, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert trainspec([command, "first", "--html", "no/page.html"]) == 2
    said = capsys.readouterr().err
    assert "--html no/page.html " in said and "No such file" in said
    assert "existing folder" in said


def test_a_recipe_that_is_closed_to_this_user_is_named(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def closed(run: RunDir) -> str:
        raise PermissionError(13, "closed", str(run.composed_yaml))

    monkeypatch.setattr(diagnose, "read_composed", closed)
    assert trainspec(["report", "first", "--html", "page.html"]) == 4
    assert "chmod -R g+rX runs/tiny/one" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff", b"x" * (2**18 + 1)])
def test_a_damaged_recipe_is_named(run: RunDir, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    run.composed_yaml.write_bytes(content)
    assert trainspec(["report", "first", "--html", "page.html"]) == 4
    assert "composed.yaml" in capsys.readouterr().err
    assert trainspec(["report", "first"]) == 0
