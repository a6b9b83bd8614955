from __future__ import annotations

import json
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
from lab.gpus.machines import play

from trainspec_cli.core.errors import MachineError
from trainspec_cli.wings.doctor import checks
from trainspec_cli.wings.doctor.examine import Needs, check_room, preflight

Usage = namedtuple("Usage", "total used free")
NEEDS = Needs(processes=1, memory_bytes=0, gpu_memory_bytes=0, uses_gpus=False, checkpoint_bytes=2**20, checkpoints=3)


def give_room(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 0, int(free)))


def test_a_host_with_all_that_the_run_takes_is_let_in_without_a_word(tmp_path: Path, monkeypatch) -> None:
    give_room(monkeypatch, 2**34)
    assert preflight(tmp_path, NEEDS) == []


def test_the_folder_need_not_be_there_yet(tmp_path: Path) -> None:
    assert list(check_room(tmp_path / "runs/quickstart", NEEDS)) == []
    assert not (tmp_path / "runs").exists()


def test_a_disk_without_room_for_one_checkpoint_is_refused_by_the_hosts_name(tmp_path: Path, monkeypatch) -> None:
    give_room(monkeypatch, 0.9 * 2**20)
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    with pytest.raises(MachineError) as caught:
        preflight(tmp_path, NEEDS)
    (problem,) = caught.value.problems
    assert (caught.value.exit_code, problem.code) == (4, "unfit_host")
    assert problem.message.startswith("node7 is not fit: disk: 921.60 KiB free in ")
    assert "choose another run.dir" in problem.hint
    assert "run.preflight=false" in problem.hint


def test_a_disk_that_cannot_keep_all_checkpoints_is_warned_of(tmp_path: Path, monkeypatch) -> None:
    give_room(monkeypatch, 2.5 * 2**20)
    (check,) = preflight(tmp_path, NEEDS)
    assert (check.name, check.status) == ("disk", "warn")
    assert preflight(tmp_path, replace(NEEDS, checkpoints=2)) == [], "one lies there already"


def test_memory_that_other_programs_hold_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"memory: .* available, and the run takes 1024\.00 TiB"):
        preflight(tmp_path, replace(NEEDS, memory_bytes=2.0**50))


@pytest.mark.parametrize(("used_gib", "status"), [(5, "ok"), (25, "warn"), (45, "fail")])
def test_a_gpu_that_somebody_uses_is_told_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, used_gib: int, status: str
) -> None:
    play(write_machine(tmp_path, used_gib), monkeypatch)
    found = list(checks.check_gpus(needed_bytes=40 * 2**30))
    assert [check.status for check in found] == ([] if status == "ok" else [status])
    assert all("nvidia-smi" in check.advice for check in found)


def write_machine(folder: Path, used_gib: int) -> str:
    """Describe a node with one H100, of which another program holds some memory."""
    machine = folder / "machine.json"
    machine.write_text(json.dumps({"gpus": [{"card": "h100_sxm", "used_mib": used_gib * 1024}]}))
    return str(machine)


def test_shared_memory_matters_where_several_processes_share_it(tmp_path: Path, monkeypatch) -> None:
    give_room(monkeypatch, 2**26)
    assert preflight(tmp_path, NEEDS) == []
    assert "/dev/shm" in {check.name for check in preflight(tmp_path, replace(NEEDS, processes=2))}


@pytest.mark.parametrize(("uses_gpus", "found"), [(True, ["chips"]), (False, [])])
def test_gpus_are_looked_at_where_the_run_uses_them(tmp_path: Path, monkeypatch, uses_gpus: bool, found: list) -> None:
    give_room(monkeypatch, 2**34)
    play(write_machine(tmp_path, 25), monkeypatch)
    monkeypatch.setattr(checks, "torch_build", lambda: ("2.13.0+cu128", "12.8", ""))
    warned = preflight(tmp_path, replace(NEEDS, uses_gpus=uses_gpus, gpu_memory_bytes=2.0**30))
    assert [check.name for check in warned] == found
    if uses_gpus:
        with pytest.raises(MachineError, match="and the run takes 60"):
            preflight(tmp_path, replace(NEEDS, uses_gpus=True, gpu_memory_bytes=60 * 2.0**30))
