"""The list of the user's runs: bounded, private, and of no consequence where it is damaged or cannot be written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trainspec_cli.run.folder import known_runs
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.known_runs import remember_run
from trainspec_cli.run.folder.paths import RunDir


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / known_runs.FILE


def make(folder: Path) -> RunDir:
    run = RunDir(folder)
    write_json(run.run_json, {})
    return run


def paths() -> list[str]:
    return [known.path for known in known_runs.known_runs()]


def test_a_run_is_known_once_and_until_its_folder_is_gone(index: Path, tmp_path: Path) -> None:
    assert paths() == []
    for name in ("a", "b", "a"):
        remember_run(make(tmp_path / name), name)
    assert paths() == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    (tmp_path / "a" / "run.json").unlink()
    assert paths() == [str(tmp_path / "b")]


def test_damaged_lines_hide_no_other(index: Path, tmp_path: Path) -> None:
    remember_run(make(tmp_path / "a"))
    with index.open("ab") as file:
        file.write(b'{"path": 3}\n\xff\n[]\n{"path": "x\\u0000", "launched_from": "", "name": "", "at": 1}\n')
    remember_run(make(tmp_path / "b"))
    with index.open("ab") as file:
        file.write(b'{"path": "half')
    assert paths() == [str(tmp_path / "b"), str(tmp_path / "a")]


def test_the_older_half_goes_when_it_is_too_long(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_runs, "MOST_BYTES", 4000)
    for number in range(60):
        remember_run(make(tmp_path / str(number)))
    assert index.stat().st_size <= 4000
    found = [int(Path(path).name) for path in paths()]
    assert found == list(range(59, 59 - len(found), -1)) and len(found) > 5


def test_a_run_does_not_fail_for_its_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "file" / "cache"))
    remember_run(make(tmp_path / "a"))
    assert paths() == []
