from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys

import pytest

from trainspec_cli.corpus.publish import publishing
from trainspec_cli.errors import MachineError


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
    with pytest.raises(MachineError, match="no space left to write") as error, publishing(tmp_path / "folder"):
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
        "import os, signal, sys; from pathlib import Path; from trainspec_cli.corpus.publish import publishing\n"
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
