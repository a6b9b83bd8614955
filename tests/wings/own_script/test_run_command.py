"""`trainspec run`: what is refused before anything is started, and the output of `--dry-run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from trainspec_cli.__main__ import run
from trainspec_cli.core.environment_names import LAUNCH_ID, PROGRESS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "code", "path"),
    [
        (["run"], "usage", ""),
        (["run", "--"], "usage", ""),
        (["run", "--", "no_such_program"], "no_command", "COMMAND"),
        (["run", "--dir", "full", "--", sys.executable], "run_exists", "--dir"),
        (["run", "--max-restarts", "-1", "--", sys.executable], "usage", ""),
    ],
)
def test_an_invalid_command_is_refused_before_a_folder_is_made(
    arguments: list[str], code: str, path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run([*arguments[:1], "--json", *arguments[1:]]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["errors"]
    assert (problem["code"], problem["path"]) == (code, path)
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_shows_command_and_environment_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    assert run(["run", "--dry-run", "--json", "--dir", "new", "--", sys.executable, "train.py", "--lr", "1"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["command"] == [sys.executable, "train.py", "--lr", "1"]
    assert shown["environment"][PROGRESS].startswith(shown["environment"][LAUNCH_ID])
    assert run(["run", "--dry-run", "--", sys.executable, "-I", "train.py"]) == 0
    text = capsys.readouterr().out
    assert "-I" in text and "PYTHONPATH" in text and "train.py" in text
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--", "pyton", "train.py"], "did you mean python?"),
        (["--", sys.executable, "absent.py"], "relative paths"),
        (["--", "LR=1", "python", "train.py"], "(LR=1 trainspec run ...)"),
        (["--dir", "full", "--", sys.executable], "--dir"),
        (["torchrun", "--nproc-per-node", "8", "train.py"], "after --"),
    ],
)
def test_a_typing_error_is_answered_with_what_to_type(
    arguments: list[str], hint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert run(["run", *arguments]) == 2
    assert hint in capsys.readouterr().err
