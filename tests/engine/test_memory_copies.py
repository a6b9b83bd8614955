import shutil
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "memory_worker.py"


def run(folder, act, world_size=3):
    """-> what each rank printed."""
    ranks = [
        subprocess.Popen([sys.executable, WORKER, str(rank), str(world_size), folder, act], stdout=-1, text=True)
        for rank in range(world_size)
    ]
    said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert {rank.returncode for rank in ranks} == {-9 if act == "keep" else 0}
    return said


def test_a_lost_hosts_part_comes_from_its_neighbour(tmp_path):
    kept = run(tmp_path, "keep")
    shutil.rmtree(tmp_path / "host1")
    assert run(tmp_path, "resume") == kept
    assert [row[0] for row in kept] == ["6"] * 3


def test_other_ranks_read_what_they_need_from_whoever_has_it(tmp_path):
    run(tmp_path, "keep")
    (two,) = {row[0] for row in run(tmp_path, "resume", world_size=2)}
    assert two == "6"


def damage(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "step"),
    [
        (lambda hosts: damage(hosts[0] / "slot1" / "rank00000.safetensors"), "6"),
        (lambda hosts: [damage(host / "slot1" / "rank00000.safetensors") for host in hosts[:2]], "4"),
        (lambda hosts: (hosts[0] / "slot1" / "rank00000.json").unlink(), "6"),
        (lambda hosts: [shutil.rmtree(host) for host in hosts[:2]], "None"),
    ],
    ids=["one copy altered", "both copies altered", "a copy that was not whole", "two neighbours lost"],
)
def test_only_whole_copies_count(tmp_path, spoil, step):
    run(tmp_path, "keep")
    spoil([tmp_path / f"host{rank}" for rank in range(3)])
    assert {row[0] for row in run(tmp_path, "resume")} == {step}
