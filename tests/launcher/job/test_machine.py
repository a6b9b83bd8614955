from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainspec_cli.launcher.job import machine
from trainspec_cli.launcher.job.machine import Gpu, cpu_has_bf16, detect, usable_cores, usable_memory_bytes


class NvmlError(Exception):
    pass


class FourGpus:
    """The part of NVML that is used, for a host with four GPUs."""

    NVMLError = NvmlError

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802 - NVML's own name
        return 4

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        if index not in range(4):
            raise NvmlError(index)
        return f"GPU-{index}abc"

    def nvmlDeviceGetUUID(self, handle: str) -> str:  # noqa: N802
        return handle


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-0abc", "GPU-1abc", "GPU-2abc", "GPU-3abc"]),
        ("", []),
        ("-1", []),
        ("2,0", ["GPU-2abc", "GPU-0abc"]),
        ("1,9,2", ["GPU-1abc"]),
        ("GPU-3a", ["GPU-3abc"]),
        ("GPU-7", []),
    ],
)
def test_the_gpus_that_cuda_would_show(visible: str | None, expected: list[str]) -> None:
    nvml: Any = FourGpus()
    assert machine._visible_handles(nvml, visible) == expected


def test_the_smallest_and_oldest_gpu_speaks_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = (Gpu("H100", 80, (9, 0), 80), Gpu("V100", 32, (7, 0), 32))
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    found = detect()
    assert (found.gpu_names, found.gpu_memory_bytes, found.bf16) == (("H100", "V100"), 32, False)


def test_a_run_on_the_cpu_asks_the_cpu_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "visible_gpus", lambda: (Gpu("H100", 80, (9, 0), 80),))
    found = detect(look_for_gpus=False)
    assert (found.gpu_names, found.bf16) == ((), cpu_has_bf16())


@pytest.mark.parametrize(("flags", "native"), [("fpu avx512_bf16 sse", True), ("amx_bf16", True), ("fpu avx2", False)])
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


class DescribedGpus(FourGpus):
    """Two GPUs of which the second is in use."""

    def __init__(self) -> None:
        self.is_open = False

    def nvmlInit(self) -> None:  # noqa: N802
        self.is_open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetName(self, handle: str) -> str:  # noqa: N802
        assert self.is_open
        return f"chip {handle}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(total=80, free=80 if "0" in handle else 30)

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:  # noqa: N802
        return 9, 0


def test_gpus_are_described_and_the_driver_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = DescribedGpus()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert machine.visible_gpus() == (Gpu("chip GPU-1abc", 80, (9, 0), 30), Gpu("chip GPU-0abc", 80, (9, 0), 80))
    assert not nvml.is_open
    nvml.nvmlInit = lambda: (_ for _ in ()).throw(NvmlError())  # type: ignore[method-assign]
    assert machine.visible_gpus() == (), "there is no driver"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine.visible_gpus() == ()


@pytest.mark.parametrize(
    ("capabilities", "bf16", "fp8"),
    [([(9, 0), (9, 0)], True, True), ([(9, 0), (8, 0)], True, False), ([(8, 0), (7, 5)], False, False)],
)
def test_a_format_has_to_be_known_to_every_gpu(
    monkeypatch: pytest.MonkeyPatch, capabilities: list[tuple[int, int]], bf16: bool, fp8: bool
) -> None:
    gpus = tuple(Gpu("chip", 80 - number, capability, 80) for number, capability in enumerate(capabilities))
    monkeypatch.setattr(machine, "visible_gpus", lambda: gpus)
    found = detect(look_for_gpus=True)
    assert (found.bf16, found.fp8, found.gpu_names) == (bf16, fp8, ("chip", "chip"))
    assert found.gpu_memory_bytes == 79, "each can hold as much as the smallest"
    monkeypatch.setattr(machine, "visible_gpus", tuple)
    bare = detect(look_for_gpus=True)
    assert (bare.fp8, bare.gpu_names, bare.gpu_memory_bytes) == (False, (), 0)
