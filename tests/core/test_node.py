"""The names of this node and of its CPU, and its user's cache."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainspec_cli.core import node
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.node import private_files


def test_slurms_name_of_a_node_comes_before_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "box")
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert node.node_name() == "node7"
    monkeypatch.setenv("SLURMD_NODENAME", "")
    assert node.node_name() == "box"


def test_a_cpu_has_its_makers_name_else_its_architecture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    assert (node.cpu_name(cpuinfo), node.cpu_flags(cpuinfo)) == ("aarch64", frozenset())
    cpuinfo.write_text("processor : 0\nmodel name\t: A: chip\nflags\t\t: fpu sse\n\nmodel name : other\nflags : amx\n")
    assert (node.cpu_name(cpuinfo), node.cpu_flags(cpuinfo)) == ("A: chip", frozenset({"fpu", "sse"}))
    monkeypatch.setattr("platform.processor", lambda: "arm")
    assert node.cpu_name(tmp_path / "nothing") == "arm"


def test_the_place_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRAINSPEC_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert node.cache_dir() == tmp_path / ".cache" / "trainspec"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert node.cache_dir() == Path("/xdg/trainspec")
    monkeypatch.setenv("TRAINSPEC_CACHE", "~/mine")
    assert node.cache_dir() == tmp_path / "mine"


def test_a_cache_is_made_for_its_user_alone_and_one_that_is_shared_stays_so(tmp_path, monkeypatch):
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "new" / "cache"))
    node.make_cache()
    assert (tmp_path / "new" / "cache").stat().st_mode & 0o777 == 0o700
    (tmp_path / "team").mkdir()
    (tmp_path / "team").chmod(0o770)
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "team"))
    node.make_cache()
    assert node.cache_dir().stat().st_mode & 0o777 == 0o770


def test_a_cache_that_strangers_could_fill_is_refused(shared, stranger, monkeypatch):
    stranger("mkdir -m 755 $1", shared / "theirs")
    (shared / "everybodys").mkdir()
    (shared / "everybodys").chmod(0o777)
    for name, why in (("theirs", "belongs to another user"), ("everybodys", "can be written by every user")):
        monkeypatch.setenv("TRAINSPEC_CACHE", str(shared / name))
        for use in (node.cache_dir, node.make_cache):
            with pytest.raises(MachineError, match=why) as caught:
                use()
            assert "TRAINSPEC_CACHE=FOLDER" in caught.value.problems[0].hint


def test_a_place_where_no_cache_can_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(MachineError, match=r"cannot .*file/cache"):
        node.make_cache()


def test_files_stay_private_while_any_thread_wants_them_so() -> None:
    """The mask is the process's: blocks of two threads that overlap end in the order in which they began."""
    usual = os.umask(0o022)
    try:
        first, second = private_files(), private_files()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert os.umask(0o077) == 0o077, "the second block has not ended"
        second.__exit__(None, None, None)
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(usual)
