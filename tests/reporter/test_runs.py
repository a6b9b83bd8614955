from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.reporter.runs import last_step, list_runs, status_of
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.events import TAIL_BYTES
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.paths import RunDir


def test_runs_are_listed_newest_first_with_how_they_stand(tmp_path: Path) -> None:
    for name, created_at in (("tiny/old", 1.0), ("quick/new", 2.0), ("tiny/alive", 3.0)):
        write_json(RunDir(tmp_path / name).run_json, {"recipe": name.split("/")[0], "created_at": created_at})
    write_json(RunDir(tmp_path / "quick/new").result_json, {"status": "stopped"})
    (tmp_path / "tiny/old/checkpoints").mkdir()
    lines = list_runs(tmp_path, lambda run: run.root.name == "alive", lambda run: False)
    assert [(Path(line.path).name, line.recipe, line.status) for line in lines] == [
        ("alive", "tiny", "running"),
        ("new", "quick", "stopped"),
        ("old", "tiny", "made"),
    ]


def test_without_a_folder_there_are_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "missing", lambda run: False, lambda run: False) == []


def test_the_last_step_is_found_at_the_end_of_a_long_file(fake_run: Any) -> None:
    fake_run.start()
    fake_run.write("warning", step=0, message="x" * TAIL_BYTES)
    assert last_step(fake_run.dir) is None
    for step in (1, 2):
        fake_run.step(step, loss=float(step))
    fake_run.write("checkpoint", step=2, path="p", bytes=1, seconds=0.1)
    with fake_run.dir.events(0).open("ab") as file:
        file.write(b'{"type": "step"')
    newest = last_step(fake_run.dir)
    assert newest is not None and (newest.step, newest.loss) == (2, 2.0)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


@pytest.mark.parametrize("is_for_slurm", [True, False], ids=["for Slurm", "of a sweep"])
def test_a_run_that_was_never_started_is_made_and_one_that_began_and_left_no_result_was_killed(
    run: RunDir, is_for_slurm: bool
) -> None:
    if is_for_slurm:
        run.job_sbatch.touch()
    assert status_of(run, running=False, queued=False) == "made"
    generations.begin(run)
    assert status_of(run, running=False, queued=False) == "killed"


def test_a_stopped_job_that_waits_to_go_on_is_queued(run: RunDir) -> None:
    write_json(run.result_json, {"status": "stopped"})
    assert status_of(run, running=False, queued=False) == "stopped"
    assert status_of(run, running=False, queued=True) == "queued"


def test_a_job_lost_with_its_host_is_queued_though_its_lock_is_left(run: RunDir) -> None:
    assert status_of(run, running=True, queued=True) == "queued"
    assert status_of(run, running=True, queued=False) == "running"


def test_a_line_tells_how_far_a_run_came(fake_run: Any) -> None:
    fake_run.about()
    generations.begin(fake_run.dir)
    fake_run.start()
    for step in (1, 2):
        fake_run.step(step, loss=float(step))
    (line,) = list_runs(fake_run.dir.root.parent, lambda run: False, lambda run: False)
    assert (line.step, line.max_steps, line.loss, line.created_at, line.recipe) == (2, 20, 2.0, 1000.0, "tiny")
    assert (line.path, line.status, line.damage) == (str(fake_run.dir.root), "killed", "")


def test_a_run_that_made_no_step_yet_has_no_loss(fake_run: Any) -> None:
    fake_run.about()
    (line,) = list_runs(fake_run.dir.root.parent, lambda run: False, lambda run: True)
    assert (line.step, line.loss, line.status) == (0, None, "queued")


def test_a_damaged_run_hides_no_other_and_what_lies_in_a_run_is_not_listed(tmp_path: Path) -> None:
    write_json(RunDir(tmp_path / "good").run_json, {"recipe": "tiny", "created_at": 1.0})
    write_json(RunDir(tmp_path / "good" / "inner").run_json, {"recipe": "inner", "created_at": 1.0})
    bad = RunDir(tmp_path / "bad").run_json
    bad.parent.mkdir()
    bad.write_text("{")
    lines = {Path(line.path).name: line for line in list_runs(tmp_path, lambda run: False, lambda run: False)}
    assert {name: line.status for name, line in lines.items()} == {"good": "made", "bad": "damaged"}
    assert "is not JSON" in lines["bad"].damage and lines["bad"].created_at > 1.0
