"""A node's copy of the run folder, which a `Mirror` keeps the same as the first node's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.waiting import wait_for

from trainspec_cli.core.errors import MachineError
from trainspec_cli.run.backend.nodes.mirror import Mirror, copy_folder
from trainspec_cli.run.channel.folders import FolderServer, RemoteFolder
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.folder.generations import GenerationRecord
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.machine import listen

SECRET = b"s" * 32


def about(memory_secret: str = "one", data_dir: str | None = None) -> dict[str, object]:
    about = {"recipe": "r", "digest": "d", "argv": [], "trainspec": "1", "created_at": 0.0, "data_dir": data_dir}
    return about | {"spec_version": "1.0", "git": None, "memory_secret": memory_secret}


@pytest.fixture
def first(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "first")
    write_json(run.run_json, about())
    run.plan_json.write_text("{}")
    return run


@pytest.fixture
def own(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "own")


@pytest.fixture
def server(first: RunDir) -> Iterator[FolderServer]:
    server = FolderServer(first, SECRET, listen("127.0.0.1"))
    yield server
    server.close()


@pytest.fixture
def mirror(server: FolderServer) -> Iterator[Callable[[RunDir], Mirror]]:
    opened: list[Mirror] = []

    def open_mirror(run: RunDir) -> Mirror:
        opened.append(Mirror(run, 1, ("127.0.0.1", server.port), SECRET))
        return opened[-1]

    yield open_mirror
    for one in opened:
        one.close()


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def has(path: Path, text: str) -> Callable[[], bool]:
    return lambda: path.is_file() and path.read_text() == text


def test_control_files_come_and_what_the_node_writes_goes(first: RunDir, own: RunDir, mirror):
    append(first.events(0), "first\n")
    mirror(own)
    wait_for(has(own.plan_json, "{}"))
    assert own.plan_json.stat().st_mode & 0o777 == 0o600
    append(own.events(1), "1\n2\nhal")
    append(own.logs / "launch_01" / "node00001" / "stdout.log", "out")
    append(own.logs / "launch_01" / "node00001" / "stderr.log", "")
    write_json(own.error(1), {"rank": 1})
    wait_for(has(first.events(1), "1\n2\n"))
    wait_for(has(first.logs / "launch_01" / "node00001" / "stdout.log", "out"))
    wait_for(has(first.logs / "launch_01" / "node00001" / "stderr.log", ""))
    wait_for(first.error(1).is_file)
    append(own.events(1), "f\n3\n")
    append(first.events(0), "second\n")
    wait_for(has(first.events(1), "1\n2\nhalf\n3\n"))
    wait_for(has(own.events(0), "first\nsecond\n"))
    first.plan_json.write_text('{"changed": 1}')
    wait_for(has(own.plan_json, '{"changed": 1}'))


def test_reports_that_the_first_node_has_moved_away_go_everywhere(first: RunDir, own: RunDir, mirror):
    mirror(own)
    wait_for(own.plan_json.is_file)
    write_json(own.error(1), {"rank": 1})
    write_json(own.result_json, {"status": "stopped"})
    wait_for(lambda: first.error(1).is_file() and first.result_json.is_file())
    first.error(1).unlink()
    first.result_json.unlink()
    wait_for(lambda: not own.error(1).exists() and not own.result_json.exists())


def test_a_node_that_returns_has_the_lines_of_all_nodes_before_a_start(first: RunDir, own: RunDir, mirror):
    """Rank 0 was on this node, then on another one, and is here again; the supervisor has added a line."""
    one = mirror(own)
    wait_for(own.plan_json.is_file)
    append(own.events(0), "1\n")
    wait_for(has(first.events(0), "1\n"))
    append(first.events(0), "restart\n")
    append(own.events(0), "2\n")
    wait_for(has(first.events(0), "1\nrestart\n2\n"))
    number = generations.begin(first)
    wait_for(lambda: generations.newest(own) == number)
    assert own.events(0).read_text() == "1\nrestart\n2\n"
    append(own.events(0), "3\n")
    wait_for(has(first.events(0), "1\nrestart\n2\n3\n"))
    one.check()


def test_what_is_left_of_an_earlier_start_is_removed(first: RunDir, own: RunDir, mirror):
    write_json(own.run_json, about())
    for left in (own.result_json, own.error(1), own.generation(7)):
        write_json(left, {})
    append(own.events(1), "old\n")
    mirror(own)
    wait_for(lambda: not (own.result_json.exists() or own.error(1).exists() or own.generation(7).exists()))
    append(own.events(1), "new\n")
    wait_for(has(first.events(1), "new\n"))


def test_a_folder_of_another_run_is_left_alone(own: RunDir, mirror):
    write_json(own.run_json, about("two"))
    one = mirror(own)

    def refused() -> bool:
        try:
            one.check()
        except MachineError as error:
            return error.problems[0].code == "other_run"
        return False

    wait_for(refused)
    assert [path.name for path in own.root.iterdir()] == ["run.json"]


def test_a_node_that_shares_the_folder_copies_nothing(first: RunDir, mirror):
    one = mirror(first)
    before = first.plan_json.stat().st_ino
    one._thread.join(30)
    assert not one.has_own_copy
    assert first.plan_json.stat().st_ino == before


def test_the_secret_of_a_start_is_derived_and_the_data_is_copied(first: RunDir, own: RunDir, mirror, tmp_path: Path):
    data = tmp_path / "data"
    append(data / "train_00000.bin", "tokens")
    write_json(first.run_json, about(data_dir=str(data)))
    one = mirror(own)
    wait_for(own.run_json.is_file)
    record = GenerationRecord(1, 0.0, "h", "h", 1, {}, 2, "launch", "logs", (), (), folder="h:1")
    one.prepare(record)
    assert len(own.secret(1).read_bytes()) == 32
    assert not (first.root / "secrets").exists(), "it is never sent"


def test_a_copy_of_data_continues_where_it_was_interrupted(first: RunDir, server: FolderServer, tmp_path: Path):
    data = tmp_path / "data"
    append(data / "a" / "train_00000.bin", "tokens of the text")
    append(data / "manifest.json", "{}")
    write_json(first.run_json, about(data_dir=str(data)))
    copy = tmp_path / "copy"
    append(tmp_path / ".copy.partial" / "a" / "train_00000.bin", "tokens")
    with RemoteFolder(("127.0.0.1", server.port), SECRET) as remote:
        assert copy_folder(remote, "data", copy) == len(" of the text") + len("{}")
    assert (copy / "a" / "train_00000.bin").read_text() == "tokens of the text"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "data", "first"]
