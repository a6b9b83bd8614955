"""Where copies in memory lie, on a host that others use too."""

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import MachineError
from trainspec_cli.run.folder import memory
from trainspec_cli.run.folder.files import read_json, write_json
from trainspec_cli.run.folder.memory import (
    Copies,
    find_copies,
    list_copies,
    make_memory_folder,
    memory_folder,
    newest_copy,
    own_folders,
    remove_copies,
)
from trainspec_cli.run.folder.paths import RunDir


@pytest.fixture
def shm(shared, monkeypatch):
    """In place of /dev/shm."""
    monkeypatch.setattr(memory, "MEMORY", shared)
    return shared


@pytest.fixture
def make_run(tmp_path):
    def make(secret, name="run"):
        run = RunDir(tmp_path / name)
        write_json(run.run_json, {"created_at": 1.0, memory.SECRET: secret})
        return run

    return make


def leave_copy(folder, step):
    write_json(folder / "slot0" / "rank00000.json", {"about": {"step": step}})


def test_a_later_start_finds_the_copies(shm, make_run):
    run = make_run("a")
    assert find_copies(run) is None
    folder = make_memory_folder(run)
    assert (folder.parent, folder.stat().st_mode & 0o777) == (shm, 0o700)
    leave_copy(folder, 6)
    again = RunDir(run.root)
    assert (find_copies(again), make_memory_folder(again), newest_copy(again)) == (folder, folder, 6)


def test_the_place_hangs_on_a_secret_of_the_run(shm, make_run):
    """Its path and the time it was made at can be known to others."""
    one, other = memory_folder(make_run("a")), memory_folder(make_run("b"))
    assert one != other
    assert len(memory.new_secret()) == 32
    assert memory.new_secret() != memory.new_secret()


def test_a_copy_of_a_runs_folder_has_copies_of_its_own(shm, make_run):
    assert memory_folder(make_run("a")) != memory_folder(make_run("a", "copy"))


def test_a_run_from_before_there_was_a_secret_has_no_copies(shm, tmp_path):
    run = RunDir(tmp_path)
    write_json(run.run_json, {"created_at": 1.0})
    assert (find_copies(run), newest_copy(run)) == (None, 0)


def test_a_strangers_folder_in_its_place_is_neither_written_nor_believed(shm, make_run, stranger):
    run = make_run("a")
    folder = memory_folder(run)
    stranger('mkdir $1 $1/slot0 && echo \'{"about": {"step": 99}}\' > $1/slot0/rank00000.json', folder)
    for use in (make_memory_folder, find_copies, newest_copy):
        with raises(MachineError, "not_trusted", "another user, nobody") as caught:
            use(run)
        assert "checkpoint.memory_interval_steps=null" in caught.value.problems[0].hint


def test_a_strangers_link_in_its_place_is_not_followed(shm, make_run, stranger, tmp_path):
    run, victim = make_run("a"), tmp_path / "victim"
    victim.mkdir(0o700)
    stranger("ln -s $2 $1", memory_folder(run), victim)
    for use in (make_memory_folder, find_copies, newest_copy):
        with pytest.raises(MachineError, match="is not a folder"):
            use(run)
    assert not list(victim.iterdir())


def test_a_folder_that_others_may_enter_is_not_used(shm, make_run):
    run = make_run("a")
    make_memory_folder(run).chmod(0o755)
    with raises(MachineError, "not_trusted", "other users"):
        make_memory_folder(run)


def test_a_user_sees_whose_the_folders_are_and_no_others(shm, make_run, stranger):
    folders = [make_memory_folder(make_run("a", name)) for name in ("one", "two")]
    stranger("mkdir $1/trainspec-theirs && ln -s $2 $1/trainspec-link", shm, folders[0])
    (shm / "trainspec-own-link").symlink_to(folders[0])
    assert list(own_folders()) == sorted(folders)
    assert {read_json(folder / memory.OWNER)["run"].rpartition("/")[2] for folder in own_folders()} == {"one", "two"}


def test_copies_are_listed_with_their_run_step_and_size_the_largest_first(shm, make_run):
    small, large = make_run("a", "small"), make_run("a", "large")
    (shm / "trainspec-cut-short").mkdir()
    for run, steps, blocks in ((small, (4, 6), 1), (large, (), 40)):
        folder = make_memory_folder(run)
        for slot, step in enumerate(steps):
            write_json(folder / f"slot{slot}" / "rank00000.json", {"about": {"step": step}})
        (folder / "slot0").mkdir(exist_ok=True)
        (folder / "slot0" / "rank00000.safetensors").write_bytes(b"x" * 4096 * blocks)
    first, second, third = list_copies()
    assert first.run and second.run
    assert (first.folder, first.run.root, first.step) == (memory_folder(large), large.root, 0)
    assert (second.folder, second.run.root, second.step) == (memory_folder(small), small.root, 6)
    assert third == Copies(shm / "trainspec-cut-short", None, 0, 0)
    taken = [
        sum(path.stat().st_blocks for path in copies.folder.rglob("*") if path.is_file()) for copies in (first, second)
    ]
    assert [first.bytes, second.bytes] == [512 * blocks for blocks in taken]
    assert first.bytes >= 40 * 4096


def test_a_runs_copies_are_removed_and_no_others(shm, make_run):
    one, other = make_run("a", "one"), make_run("a", "other")
    leave_copy(make_memory_folder(one), 6)
    leave_copy(make_memory_folder(other), 8)
    remove_copies(one)
    remove_copies(one)
    assert (find_copies(one), newest_copy(other)) == (None, 8)
    assert newest_copy(RunDir(one.root / "nothing")) == 0
