from __future__ import annotations

from pathlib import Path
from typing import Any

from trainspec_cli.report.runs import TAIL_BYTES, last_step, list_runs
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.paths import RunDir


def test_runs_are_listed_newest_first_with_how_they_stand(tmp_path: Path) -> None:
    for name, created_at in (("tiny/old", 1.0), ("quick/new", 2.0), ("tiny/alive", 3.0)):
        write_json(RunDir(tmp_path / name).run_json, {"recipe": name.split("/")[0], "created_at": created_at})
    write_json(RunDir(tmp_path / "quick/new").result_json, {"status": "stopped"})
    (tmp_path / "tiny/old/checkpoints").mkdir()
    lines = list_runs(tmp_path, lambda run: run.root.name == "alive", lambda run: False)
    assert [(Path(line.path).name, line.recipe, line.status) for line in lines] == [
        ("alive", "tiny", "running"),
        ("new", "quick", "stopped"),
        ("old", "tiny", "killed"),
    ]


def test_without_a_folder_there_are_no_runs(tmp_path: Path) -> None:
    assert list_runs(tmp_path / "missing", lambda run: False, lambda run: False) == []


def test_the_last_step_is_found_at_the_end_of_a_long_file(fake_run: Any) -> None:
    fake_run.start()
    fake_run.write("warning", step=0, message="x" * TAIL_BYTES)
    assert last_step(fake_run.dir) == {}
    for step in (1, 2):
        fake_run.step(step, loss=float(step))
    fake_run.write("checkpoint", step=2, path="p", bytes=1, seconds=0.1)
    with fake_run.dir.events(0).open("ab") as file:
        file.write(b'{"type": "step"')
    assert (last_step(fake_run.dir)["step"], last_step(fake_run.dir)["loss"]) == (2, 2.0)
