"""The folder server: what a client with the secret may do, and what nobody may."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.run.channel.folders import FolderServer, RemoteFolder, secret_of_start
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import listen

SECRET = b"s" * 32


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    data = tmp_path / "data"
    for folder in (run.root, data):
        folder.mkdir()
    (data / "train_00000.bin").write_bytes(b"tokens")
    about = {"recipe": "r", "digest": "d", "argv": [], "trainspec": "1", "created_at": 0.0, "data_dir": str(data)}
    run.run_json.write_text(json.dumps(about | {"spec_version": "1.0", "git": None}))
    return run


@pytest.fixture
def server(run: RunDir) -> Iterator[FolderServer]:
    server = FolderServer(run, SECRET, listen("127.0.0.1"))
    yield server
    server.close()


@pytest.fixture
def remote(server: FolderServer) -> Iterator[RemoteFolder]:
    with RemoteFolder(("127.0.0.1", server.port), SECRET) as remote:
        yield remote


def test_files_are_written_read_and_removed(run: RunDir, remote: RemoteFolder, tmp_path: Path):
    large = os.urandom(3_000_000)
    (tmp_path / "large").write_bytes(large)
    assert remote.send_file(tmp_path / "large", "run/checkpoints/step_00000001/large") == len(large)
    assert run.checkpoint(1).joinpath("large").read_bytes() == large
    assert remote.read("run/checkpoints/step_00000001/large", 1000, 5) == large[1000:1005]
    assert remote.read("run/checkpoints/step_00000001/large", 2_999_999) == large[-1:]
    remote.put("run/plan.json", b"{}", mtime_us=1_700_000_000_000_001)
    assert remote.append("run/events/rank00000.jsonl", b"1\n") == 2
    assert remote.append("run/events/rank00000.jsonl", b"2\n") == 4
    listed = remote.list("run")
    assert (listed["plan.json"].size, listed["plan.json"].mtime_us) == (2, 1_700_000_000_000_001)
    assert set(listed) == {"plan.json", "run.json", "events/rank00000.jsonl"}, "a checkpoint is not a control file"
    assert set(remote.list("run/checkpoints")) == {"step_00000001/large"}
    assert set(remote.list("data")) == {"train_00000.bin"}
    assert remote.read("data/train_00000.bin") == b"tokens"
    remote.remove("run/checkpoints/step_00000001")
    assert not run.checkpoint(1).exists()


def test_a_finished_folder_replaces_an_older_one(run: RunDir, remote: RemoteFolder):
    remote.put("run/checkpoints/step_00000001/old", b"old")
    remote.put("run/checkpoints/.step_00000001.ab.partial/new", b"new")
    remote.finish("run/checkpoints/.step_00000001.ab.partial", "run/checkpoints/step_00000001")
    assert [path.name for path in run.checkpoint(1).iterdir()] == ["new"]


@pytest.mark.parametrize(
    "path", ["run/../secret", "other/x", "run/link", "run/link/x", "/etc/passwd", "data/../run/run.json"]
)
def test_nothing_outside_of_the_folders_is_served(run: RunDir, remote: RemoteFolder, tmp_path: Path, path: str):
    (tmp_path / "secret").write_text("s")
    (run.root / "link").symlink_to(tmp_path)
    for act in (
        remote.read,
        remote.remove,
        lambda path: remote.append(path, b"x"),
        lambda path: remote.put(path, b"x"),
    ):
        with pytest.raises(OSError) as refused:
            act(path)
        assert refused.value.errno == errno.EACCES
    assert (tmp_path / "secret").read_text() == "s"


def test_a_refused_write_leaves_the_connection_usable(run: RunDir, remote: RemoteFolder):
    """As on a full disk, whose error comes while the bytes are on their way."""
    run.errors_folder.mkdir()
    with pytest.raises(IsADirectoryError):
        remote.append("run/errors", b"x" * 5_000_000)
    assert remote.append("run/new", b"x") == 1
    with pytest.raises(FileNotFoundError):
        remote.read("run/missing")
    assert remote.read("run/new") == b"x"


def test_without_the_secret_nothing_is_served(server: FolderServer):
    with pytest.raises(ConnectionError):
        RemoteFolder(("127.0.0.1", server.port), b"x" * 32)


def test_a_closed_server_raises_connection_errors(server: FolderServer, remote: RemoteFolder):
    server.close()
    for _ in range(2):
        with pytest.raises(ConnectionError):
            remote.read("run/run.json")


def test_a_node_sees_whether_it_shares_the_folder(run: RunDir, remote: RemoteFolder, tmp_path: Path):
    assert remote.shares(run.root)
    assert not remote.shares(tmp_path)


def test_a_node_is_registered_as_long_as_its_connection(server: FolderServer, remote: RemoteFolder):
    with RemoteFolder(("127.0.0.1", server.port), SECRET) as other:
        other.register(3, 4711)
        remote.register(1, 4712)
        assert [(one.node, one.host, one.port) for one in remote.nodes()] == [
            (1, "127.0.0.1", 4712),
            (3, "127.0.0.1", 4711),
        ]
    wait_for(lambda: [one.node for one in remote.nodes()] == [1])


def test_each_start_has_a_secret_of_its_own():
    assert len({secret_of_start(SECRET, *start) for start in (("a", 1), ("a", 2), ("b", 1))}) == 3
