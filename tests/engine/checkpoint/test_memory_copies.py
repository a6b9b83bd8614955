import shutil
from pathlib import Path

import pytest
import torch
from lab.ranks import run_ranks

from trainspec_cli.engine.checkpoint import memory

WORKER = Path(__file__).parent / "memory_worker.py"


def run(folder, act, world_size=3):
    """-> what each rank printed."""
    ended = run_ranks(WORKER, [(rank, world_size, folder, act) for rank in range(world_size)])
    assert {rank.code for rank in ended} == {-9 if act == "keep" else 0}
    return [rank.printed.split() for rank in ended]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Three hosts' memory after a kill: -> (its folder, what each rank held at step 6)."""
    folder = tmp_path_factory.mktemp("kept")
    return folder, run(folder, "keep")


@pytest.fixture
def hosts(kept, tmp_path):
    """Copies of them."""
    for rank in range(3):
        shutil.copytree(kept[0] / f"host{rank}", tmp_path / f"host{rank}")
    return [tmp_path / f"host{rank}" for rank in range(3)]


def test_a_lost_hosts_part_comes_from_its_neighbour(tmp_path, kept, hosts):
    shutil.rmtree(hosts[1])
    assert run(tmp_path, "resume") == kept[1]
    assert [row[0] for row in kept[1]] == ["6"] * 3


def test_other_ranks_read_what_they_need_from_whoever_has_it(tmp_path, hosts):
    (step,) = {row[0] for row in run(tmp_path, "resume", world_size=2)}
    assert step == "6"


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "step"),
    [
        (lambda hosts: damage(hosts[0] / "slot1" / "rank00000.safetensors"), "6"),
        (lambda hosts: [damage(host / "slot1" / "rank00000.safetensors") for host in hosts[:2]], "4"),
        (lambda hosts: [shutil.rmtree(host) for host in hosts[:2]], "None"),
    ],
    ids=["one copy altered", "both copies altered", "two neighbours lost"],
)
def test_only_whole_copies_count(tmp_path, hosts, spoil, step):
    spoil(hosts)
    assert {row[0] for row in run(tmp_path, "resume")} == {step}


def test_no_copy_is_written_through_a_link(tmp_path):
    victim = tmp_path / "thesis"
    victim.write_text("words")
    (tmp_path / "slot0").mkdir()
    (tmp_path / "slot0" / "rank00000.safetensors").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        memory._segment(tmp_path / "slot0" / "rank00000.safetensors", 100, torch.device("cpu"))
    assert victim.read_text() == "words"
