from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from trainspec_cli.core.errors import MachineError
from trainspec_cli.data.corpus.shards import publishing


def test_the_folder_appears_whole_at_the_end(tmp_path):
    target = tmp_path / "new" / "folder"
    with publishing(target) as temporary:
        (temporary / "a").write_text("1")
        assert not target.exists()
    assert (target / "a").read_text() == "1"
    assert list(target.parent.iterdir()) == [target]


def test_every_file_and_then_the_folder_is_on_disk_before_the_rename(tmp_path, disk_calls):
    with publishing(tmp_path / "folder") as temporary:
        for name in ("a", "b"):
            (temporary / name).write_text(name)
    assert sorted(disk_calls[:2]) == [("fsync", "a"), ("fsync", "b")]
    assert disk_calls[2:] == [("fsync", temporary.name), ("rename", "folder")]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(error), publishing(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("1")
        raise error
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_taken_over_and_a_filled_one_kept(tmp_path):
    target = tmp_path / "folder"
    target.mkdir()
    with publishing(target) as temporary:
        (temporary / "a").write_text("first")
    with pytest.raises(FileExistsError), publishing(target) as temporary:
        (temporary / "a").write_text("second")
    assert (target / "a").read_text() == "first"
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_a_full_disk_is_named_and_nothing_left(tmp_path):
    with pytest.raises(MachineError, match="no space left") as error, publishing(tmp_path / "folder"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert (error.value.exit_code, error.value.problems[0].code) == (4, "disk_full")
    assert "TRAINSPEC_CACHE" in error.value.problems[0].hint
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_way_is_an_error_of_the_machine(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises((MachineError, FileExistsError)), publishing(tmp_path / "file" / "folder"):
        pass


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path):
    program = (
        "import os, signal, sys; from pathlib import Path; from trainspec_cli.data.corpus.shards import publishing\n"
        "with publishing(Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", program, str(tmp_path / "folder")], check=False)
    assert killed.returncode == -9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".trainspec-")
    with publishing(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("1")
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]


def test_the_work_of_a_living_process_or_another_host_is_left_alone(tmp_path):
    alive = tmp_path / f".trainspec-{os.getpid()}-abc@{socket.gethostname()}.tmp"
    elsewhere = tmp_path / ".trainspec-999999999-abc@another.host.tmp"
    alive.mkdir()
    elsewhere.mkdir()
    with publishing(tmp_path / "folder"):
        pass
    assert alive.exists() and elsewhere.exists()


def test_no_file_stays_open(tmp_path, monkeypatch):
    opened, closed, really_close = [], [], os.close
    with publishing(tmp_path / "folder") as temporary:
        (temporary / "a").write_text("1")
        really_open = os.open
        monkeypatch.setattr(os, "open", lambda *given: opened.append(really_open(*given)) or opened[-1])
        monkeypatch.setattr(os, "close", lambda number: closed.append(number) or really_close(number))
    assert len(opened) >= 2 and sorted(closed) == sorted(opened)


def test_a_folder_is_as_open_as_this_users_own_are(tmp_path):
    before = os.umask(0o027)
    try:
        with publishing(tmp_path / "folder") as temporary:
            assert temporary.stat().st_mode & 0o777 == 0o700, "unfinished, it is for its owner alone"
        assert os.umask(0o027) == 0o027, "looking at it has not changed it"
    finally:
        os.umask(before)
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750


def test_another_users_living_process_is_alive(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    theirs = tmp_path / f".trainspec-1-abc@{socket.gethostname()}.tmp"
    theirs.mkdir()
    with publishing(tmp_path / "folder"):
        pass
    assert theirs.exists()


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (errno.EDQUOT, "disk_full", "no space left to write"),
        (errno.EROFS, "cannot_write", "cannot write .*: Read-only file system"),
    ],
)
def test_why_a_folder_was_not_written(tmp_path, number, code, said):
    with pytest.raises(MachineError, match=said) as raised, publishing(tmp_path / "folder"):
        raise OSError(number, os.strerror(number))
    (problem,) = raised.value.problems
    assert problem.code == code and "TRAINSPEC_CACHE=FOLDER" in problem.hint
