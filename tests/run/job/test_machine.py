from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from lab.gpus.machines import play

from trainspec_cli.run.job import machine
from trainspec_cli.run.job.machine import cpu_has_bf16, detect, usable_cores, usable_memory_bytes


def test_the_smallest_and_oldest_gpu_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    play("mixed", monkeypatch)
    found = detect()
    assert found.gpu_names == ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 3090")
    assert found.gpu_memory_bytes == 24564 * 2**20
    assert (found.bf16, found.fp8) == (True, False), "a format has to be known to every GPU"


@pytest.mark.parametrize(
    ("name", "bf16", "fp8"),
    [("2xh100_sxm", True, True), ("2xa100_80gb", True, False), ("2xt4", False, False), ("amd_mi300x", True, True)],
)
def test_formats_of_gpus(monkeypatch: pytest.MonkeyPatch, name: str, bf16: bool, fp8: bool) -> None:
    play(name, monkeypatch)
    found = detect()
    assert (found.bf16, found.fp8) == (bf16, fp8)


def test_a_run_on_the_cpu_asks_the_cpu_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    play("lost", monkeypatch)
    found = detect(look_for_gpus=False)
    assert (found.gpu_names, found.bf16, found.gpu_problem) == ((), cpu_has_bf16(), None)


@pytest.mark.parametrize(
    ("flags", "native"), [("fpu avx512_bf16 amx_bf16", True), ("fpu avx512_bf16 sse", False), ("fpu avx2", False)]
)
def test_bf16_is_read_from_the_flags(tmp_path: Path, flags: str, native: bool) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"model name\t: amx_bf16 by name alone\nflags\t\t: {flags}\n")
    assert cpu_has_bf16(cpuinfo) is native


def test_a_system_that_does_not_say_has_no_bf16(tmp_path: Path) -> None:
    assert cpu_has_bf16(tmp_path / "missing") is False


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_the_affinity_limits_the_cores() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_a_container_limits_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"cpu.max": "50000 100000", "memory.max": "1048576"}
    monkeypatch.setattr(machine, "_cgroup_setting", settings.__getitem__)
    assert (usable_cores(), usable_memory_bytes()) == (1, 1048576)


@pytest.mark.parametrize(
    ("groups", "found"),
    [
        ("12:cpu:/old\n0::/box/job\n", "1048576"),
        ("0::/\n", "max"),
        ("0::/gone\n", ""),
        ("12:cpu:/box\n", ""),
    ],
    ids=["a container", "the root", "a group that is gone", "version 1 alone"],
)
def test_a_limit_is_that_of_the_process_own_group(tmp_path: Path, groups: str, found: str) -> None:
    root, membership = tmp_path / "root", tmp_path / "membership"
    (root / "box" / "job").mkdir(parents=True)
    (root / "box" / "job" / "memory.max").write_text("1048576\n")
    (root / "memory.max").write_text("max\n")
    membership.write_text(groups)
    assert machine._cgroup_setting("memory.max", root, membership) == found


@pytest.mark.parametrize(
    ("groups", "files", "found"),
    [
        ("0::/box\n", {"box/memory.events": "low 1\noom 3\noom_kill 2\noom_group_kill 7\n"}, 2),
        ("0::/box/own\n", {"box/memory.events": "oom_kill 2\n"}, 2),
        ("4:memory:/box\n0::/\n", {"memory/box/memory.oom_control": "oom_kill_disable 0\noom_kill 4\n"}, 4),
        ("4:cpu,memory:/elsewhere\n", {"memory/memory.oom_control": "under_oom 0\noom_kill 5\n"}, 5),
        ("0::/gone\n", {}, 9),
    ],
    ids=["version 2", "version 2 above it", "version 1", "version 1 in a container", "the node"],
)
def test_kills_for_want_of_memory_are_counted(tmp_path: Path, groups: str, files: dict[str, str], found: int) -> None:
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(groups)
    (tmp_path / "vmstat").write_text("nr_free_pages 8\noom_kill 9\n")
    places = tmp_path / "root", tmp_path / "membership", tmp_path / "vmstat"
    assert machine.count_oom_kills(*places) == found
    (tmp_path / "vmstat").unlink()
    assert machine.count_oom_kills(*places) == (found if files else 0)


def test_without_a_container_all_memory_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_setting", lambda name: "")
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: SimpleNamespace(total=7 * 2**30))
    assert usable_memory_bytes() == 7 * 2**30
