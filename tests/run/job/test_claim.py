from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainspec_cli.core.environment_names import LAUNCH_ID
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job import folder as claiming
from trainspec_cli.run.job.folder import claim, is_running


@pytest.mark.clause("LAUNCH-4")
def test_a_run_is_held_by_one_launch_at_a_time(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    assert not is_running(run)
    with claim(run, "a"):
        assert is_running(run)
        with pytest.raises(RecipeError, match="still running"), claim(run, "b"):
            pass
    assert not is_running(run)
    assert not run.pid_json.exists()


def test_a_lock_on_a_file_that_has_been_replaced_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch before may end, and another begin, between the opening of the file and its lock."""
    run, lock = RunDir(tmp_path), claiming._lock

    def replace_and_lock(descriptor: int) -> bool:
        run.pid_json.rename(tmp_path / "earlier")
        run.pid_json.write_text("{}")
        return lock(descriptor)

    monkeypatch.setattr(claiming, "_lock", replace_and_lock)
    with pytest.raises(RecipeError, match="still running"), claim(run, "late"):
        pass
    assert run.pid_json.read_text() == "{}"


def test_a_launch_that_fails_lets_go(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    with pytest.raises(ZeroDivisionError), claim(run, "a"):
        raise ZeroDivisionError
    with claim(run, "b"):
        assert is_running(run)


@pytest.mark.clause("LAUNCH-4")
def test_a_killed_launch_lets_go_once_its_workers_are_gone(tmp_path: Path) -> None:
    run, launch_id = RunDir(tmp_path), f"killed-{os.getpid()}"
    program = f"""
import os, signal
from trainspec_cli.run.job.folder import claim
from trainspec_cli.core.reading.files import UnreadableFileError
from trainspec_cli.run.folder.paths import RunDir
with claim(RunDir({str(tmp_path)!r}), {launch_id!r}):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    assert run.pid_json.exists()
    worker = subprocess.Popen(["sleep", "60"], env={**os.environ, LAUNCH_ID: launch_id})
    try:
        assert is_running(run)
        with pytest.raises(RecipeError, match="still running"), claim(run, "next"):
            pass
    finally:
        worker.kill()
        worker.wait()
    assert not is_running(run)
    with claim(run, "next"):
        assert is_running(run)


def test_nothing_is_left_of_a_longer_note_of_a_killed_launch(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.pid_json, {"pid": 1, "host": "h" * 300, "launch_id": "killed-long-ago"})
    with claim(run, "next"):
        assert read_json(run.pid_json)["launch_id"] == "next"


def test_a_link_in_the_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    run, victim = RunDir(tmp_path / "run"), tmp_path / "thesis"
    run.root.mkdir()
    victim.write_text("words")
    run.pid_json.symlink_to(victim)
    assert not is_running(run)
    with pytest.raises(OSError, match="symbolic links"), claim(run, "a"):
        pass
    assert victim.read_text() == "words"


def test_a_pipe_in_the_place_of_the_lock_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pid.json")
    with pytest.raises(UnreadableFileError, match="not a regular file"):
        is_running(RunDir(tmp_path))


@pytest.mark.parametrize(("own_job", "alive", "held"), [(None, True, True), ("8", True, True), ("7", True, False),
                                                       (None, False, False)])  # fmt: skip
def test_a_run_of_a_slurm_job_is_held_while_the_job_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_job: str | None, alive: bool, held: bool
) -> None:
    run, asked = RunDir(tmp_path), []
    write_json(run.pid_json, {"pid": 1, "host": "h", "launch_id": "long-gone", "slurm_job_id": "7"})
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    if own_job:
        monkeypatch.setenv("SLURM_JOB_ID", own_job)
    monkeypatch.setattr(claiming.slurm, "is_alive", lambda job_id: asked.append(job_id) or alive)
    assert is_running(run) == held
    assert set(asked) <= {"7"}
    if held:
        with pytest.raises(RecipeError, match="still running"), claim(run, "next"):
            pass
        assert read_json(run.pid_json)["launch_id"] == "long-gone"
    else:
        with claim(run, "next"):
            assert read_json(run.pid_json).get("slurm_job_id") == own_job


def test_slurms_next_start_of_a_job_takes_its_run_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    with claim(run, "before"):
        assert read_json(run.pid_json)["slurm_job_id"] == "7"
        with claim(run, "after"):
            assert read_json(run.pid_json)["launch_id"] == "after"
        assert not run.pid_json.exists()


@pytest.mark.parametrize("note", ["", '{"launch_id": 3}', '{"launch_id": "a", "slurm_job_id": 7}', "[]", '{"pid'])
def test_a_note_that_is_not_whole_holds_nothing(tmp_path: Path, note: str) -> None:
    run = RunDir(tmp_path)
    run.pid_json.write_text(note)
    assert not is_running(run)
    with claim(run, "a"):
        assert is_running(run)


@pytest.mark.parametrize(("glances", "is_held"), [(3, False), (1000, True)])
def test_a_glance_of_another_at_the_lock_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, glances: int, is_held: bool
) -> None:
    run, tries, now = RunDir(tmp_path), [], [0.0]
    lock = claiming._lock

    def locked_for_a_while(descriptor: int) -> bool:
        tries.append(descriptor)
        return len(tries) > glances and lock(descriptor)

    monkeypatch.setattr(claiming, "_lock", locked_for_a_while)
    monkeypatch.setattr(claiming.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(claiming.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    if is_held:
        with pytest.raises(RecipeError, match="still running"), claim(run, "a"):
            pass
        assert 10 <= len(tries) <= 13
    else:
        with claim(run, "a"):
            assert len(tries) == glances + 1
