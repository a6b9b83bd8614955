"""Checkpoints on hosts that share no disk: three ranks, each on its own host."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from lab.ranks import run_ranks

WORKER = Path(__file__).parent / "disk_worker.py"


def run(folder: Path, act: str, hosts: Sequence[int] = (0, 1, 2)) -> list[str]:
    """Return what the ranks printed, which is the same on each."""
    (folder / "secret").touch(0o600)
    (folder / "secret").write_bytes(b"s" * 32)
    ended = run_ranks(WORKER, [(rank, ",".join(map(str, hosts)), folder, act) for rank in range(len(hosts))])
    assert {rank.code for rank in ended} == {0}, ended
    (printed,) = {rank.printed for rank in ended}
    return printed.split()


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, list[str]]:
    """Return the folder of three hosts' disks after checkpoints of steps 4 and 6, and what the ranks held at step 6."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(folder, "save")


@pytest.fixture
def hosts(saved, tmp_path) -> list[Path]:
    """Return copies of the disks."""
    for number in range(3):
        shutil.copytree(saved[0] / f"host{number}", tmp_path / f"host{number}")
    return [tmp_path / f"host{number}" for number in range(3)]


def ranks_on(host: Path, step: int = 6) -> list[int]:
    files = (host / "checkpoints" / f"step_{step:08d}").glob("rank*.safetensors")
    return sorted(int(path.name[4:9]) for path in files)


def file_of(host: Path, rank: int, step: int = 6) -> Path:
    return host / "checkpoints" / f"step_{step:08d}" / f"rank{rank:05d}.safetensors"


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_each_file_is_on_its_host_and_on_the_next(saved):
    for step in (4, 6):
        assert [ranks_on(saved[0] / f"host{number}", step) for number in range(3)] == [[0, 2], [0, 1], [1, 2]]
    assert not list(saved[0].rglob("*.partial"))


@pytest.mark.parametrize("left", [(1, 2), (0, 2), (1, 0), (2, 0, 1)], ids=str)
def test_any_hosts_that_have_all_files_restore_it(saved, hosts, tmp_path, left):
    """On fewer hosts, and in another order."""
    for number in {0, 1, 2} - set(left):
        shutil.rmtree(hosts[number])
    assert run(tmp_path, "resume", left) == saved[1]


def test_the_first_host_alone_restores_it_from_spares(saved, hosts, tmp_path):
    assert ranks_on(hosts[0]) == [0, 2]
    assert run(tmp_path, "resume with 1 2", (0,)) == saved[1]


def test_one_of_three_hosts_with_a_new_one_does_not_have_all_files(hosts, tmp_path):
    """The run does not start from the first step again, and nothing is removed, because the others may return."""
    before = [ranks_on(host) for host in hosts]
    assert run(tmp_path, "resume", (2, 5)) == ["bad_checkpoint"]
    assert [ranks_on(host) for host in hosts] == before


def test_a_damaged_file_is_replaced_by_its_copy(saved, hosts, tmp_path):
    damage(file_of(hosts[0], 0))
    damage(file_of(hosts[2], 1))
    assert run(tmp_path, "resume") == saved[1]
    assert file_of(hosts[0], 0).read_bytes() == file_of(hosts[1], 0).read_bytes()


def test_without_an_intact_copy_nothing_is_restored(hosts, tmp_path):
    damage(file_of(hosts[0], 0))
    damage(file_of(hosts[1], 0))
    assert run(tmp_path, "resume") == ["bad_checkpoint"]


def test_a_checkpoint_that_is_not_complete_is_passed_over_and_removed(hosts, tmp_path):
    for host in hosts[:2]:
        file_of(host, 0).unlink()
    assert run(tmp_path, "resume")[0] == "4"
    assert [ranks_on(host) for host in hosts] == [[], [], []]


def test_files_of_another_history_are_not_mixed_in(saved, hosts, tmp_path):
    """Host 2 was away while the others trained again from an earlier step: its files have the same names and sizes."""
    other = tmp_path / "other"
    other.mkdir()
    assert run(other, "save again") != saved[1]
    shutil.rmtree(hosts[2])
    shutil.copytree(other / "host2", hosts[2])
    assert run(tmp_path, "resume") == saved[1]


def test_an_interrupted_copy_continues(saved, hosts, tmp_path):
    whole = file_of(hosts[1], 0).read_bytes()
    file_of(hosts[0], 0).unlink()
    partial = file_of(hosts[0], 0).with_name(".rank00000.safetensors.partial")
    partial.write_bytes(whole[:50])
    inode = partial.stat().st_ino
    assert run(tmp_path, "resume") == saved[1]
    assert (file_of(hosts[0], 0).read_bytes(), file_of(hosts[0], 0).stat().st_ino) == (whole, inode)


def test_the_copy_goes_to_the_host_after_one_that_is_lost(tmp_path):
    held = run(tmp_path, "save lost")
    disks = [tmp_path / f"host{number}" for number in range(3)]
    assert [ranks_on(disks[number]) for number in (0, 2)] == [[0, 2], [0, 1, 2]]
    assert run(tmp_path, "resume", (0, 2)) == held
