"""The requests to stop, by start of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainspec_cli.core.environment_names import GENERATION
from trainspec_cli.run.folder.files import read_json
from trainspec_cli.run.folder.generations import may_stop, note_stop, was_stop_noted
from trainspec_cli.run.folder.paths import RunDir


def test_a_stop_is_noted_for_one_start_alone(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    note_stop(run, 3)
    assert [was_stop_noted(run, generation) for generation in (2, 3, 4)] == [False, True, False]
    assert read_json(run.stop(3))["generation"] == 3


def test_a_full_disk_does_not_keep_the_workers_from_being_asked(tmp_path: Path) -> None:
    (tmp_path / "stops").touch()
    note_stop(RunDir(tmp_path), 3)
    assert not was_stop_noted(RunDir(tmp_path), 3)


@pytest.mark.parametrize(("generation", "may"), [("3", True), ("4", False), (None, True)])
def test_a_worker_may_stop_where_its_own_start_was_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, generation: str | None, may: bool
) -> None:
    """A worker that no launch started takes the signal itself for the request."""
    note_stop(RunDir(tmp_path), 3)
    if generation is None:
        monkeypatch.delenv(GENERATION, raising=False)
    else:
        monkeypatch.setenv(GENERATION, generation)
    assert may_stop(RunDir(tmp_path)) is may


def test_a_request_says_who_asked_and_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 12.5)
    monkeypatch.setattr("socket.gethostname", lambda: "node3")
    note_stop(RunDir(tmp_path), 4)
    assert read_json(RunDir(tmp_path).stop(4)) == {"generation": 4, "host": "node3", "at": 12.5}
