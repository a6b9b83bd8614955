from __future__ import annotations

import os
import platform
import resource
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lab.gpus.machines import play

from trainspec_cli.wings.doctor import checks

Usage = namedtuple("Usage", "total used free")


def test_this_host_is_checked(tmp_path: Path) -> None:
    found = checks.check_node(tmp_path, "cpu")
    assert {"versions", "chips", "clock", "open files", "disk"} <= {check.name for check in found}
    assert all(check.advice for check in found if check.status != "ok")
    assert not list(tmp_path.iterdir()), "no file is left"


def test_a_missing_gpu_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play("no_gpus", monkeypatch)
    (chips,) = checks.check_chips("cuda")
    assert chips.status == "fail" and "no GPU" in chips.found


@pytest.mark.parametrize(("free", "status"), [(2**26, "warn"), (2**34, "ok")])
def test_little_shared_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free, 0, free))
    (check,) = checks.check_shm(tmp_path)
    assert check.status == status
    assert ("--shm-size" in check.advice) == (status == "warn")


@pytest.mark.parametrize(
    ("free", "bytes_per_s", "status"), [(2**30, 20e6, "ok"), (2**30 - 1, 20e6, "fail"), (2**30, 19e6, "warn")]
)
def test_a_full_disk_is_a_failure_and_a_slow_one_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, bytes_per_s: float, status: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 0, free))
    monkeypatch.setattr(checks, "measure_disk", lambda _: bytes_per_s)
    (found,) = checks.check_disk(tmp_path)
    assert (found.status, bool(found.advice)) == (status, status != "ok")


def test_rdma_ports_that_are_down_are_a_warning(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    up, down = checks.check_rdma(tmp_path)
    assert up.status == "ok" and up.found.startswith("mlx5_0 port 1: 400 Gb/sec")
    assert down.status == "warn" and down.found.startswith("mlx5_1 port 1 ") and "DOWN" in down.found


def test_measuring_the_disk_does_not_follow_a_link_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("words")
    (tmp_path / f".doctor-{platform.node()}-{os.getpid()}").symlink_to(tmp_path / "thesis")
    checks.measure_disk(tmp_path)
    assert (tmp_path / "thesis").read_text() == "words"


def summaries(found: object) -> list[tuple[str, str, str]]:
    return [(check.name, check.status, check.found) for check in found]  # type: ignore[attr-defined]


def memory(monkeypatch: pytest.MonkeyPatch, available: int) -> None:
    figures = SimpleNamespace(available=available, total=2**36)
    monkeypatch.setattr(checks.psutil, "virtual_memory", lambda: figures)


@pytest.mark.parametrize(
    ("available", "needed", "status", "part"),
    [
        (2**30, 0, "ok", "1.00 GiB of 64.00 GiB"),
        (2**30 - 1, 0, "warn", "1024.00 MiB of 64.00 GiB"),
        (2**31, 2**31, "ok", "2.00 GiB of 64.00 GiB"),
        (2**31, 2**31 + 1, "fail", "needs 2.00 GiB"),
    ],
)
def test_memory(monkeypatch: pytest.MonkeyPatch, available: int, needed: int, status: str, part: str) -> None:
    memory(monkeypatch, available)
    (found,) = checks.check_memory(needed)
    assert (found.name, found.status, bool(found.advice)) == ("memory", status, status != "ok")
    assert part in found.found


BUILDS = {"cpu": ("2.13.0+cpu", "", ""), "cuda": ("2.13.0+cu128", "12.8", ""), "rocm": ("2.13.0+rocm7", "", "7.0.1")}


@pytest.mark.parametrize(
    ("machine", "build", "expected"),
    [
        ("2xh100_sxm", "cuda", [("chips", "ok", "2 x NVIDIA H100 80GB HBM3, 79.65 GiB; driver 570.133.20")]),
        ("mixed", "cuda", [("chips", "ok"), ("chips", "warn")]),
        ("amd_visible", "rocm", [("chips", "warn"), ("chips", "ok")]),
        ("amd_visible", "cuda", [("chips", "warn"), ("chips", "ok"), ("torch", "fail")]),
        ("2xh100_sxm", "cpu", [("chips", "ok"), ("torch", "fail")]),
        ("old_driver", "cuda", [("chips", "ok"), ("torch", "fail")]),
        ("lost", "cuda", [("chips", "fail")]),
        ("no_gpus", "cuda", [("chips", "fail")]),
        ("visible_none", "cuda", [("chips", "warn"), ("chips", "fail")]),
    ],
)
def test_gpus_must_match_torch_and_the_driver(
    monkeypatch: pytest.MonkeyPatch, machine: str, build: str, expected: list[tuple[str, ...]]
) -> None:
    play(machine, monkeypatch)
    monkeypatch.setattr(checks, "torch_build", lambda: BUILDS[build])
    found = summaries(checks.check_chips("cuda"))
    assert [one[: len(wanted)] for one, wanted in zip(found, expected, strict=True)] == expected


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    version, cuda, hip = checks.torch_build()
    assert version == metadata.version("torch") or version.startswith(metadata.version("torch"))
    assert bool(cuda or hip) == ("+cpu" not in version)


def test_gpus_are_not_searched_for_a_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    play("lost", monkeypatch)
    monkeypatch.setattr(checks, "cpu_name", lambda: "a chip")
    (found,) = summaries(checks.check_chips("cpu"))
    assert found[:2] == ("chips", "ok")
    assert "cores of a chip" in found[2]


def test_each_gpu_in_use_is_reported_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    play("busy", monkeypatch)
    (used,) = checks.check_gpus()
    assert used.status == "warn"
    assert "GPU 3 (NVIDIA H100" in used.found and "58.59 GiB of 79.65 GiB" in used.found
    (lacking,) = checks.check_gpus(40.0 * 2**30)
    assert lacking.status == "fail" and "40.00 GiB" in lacking.found


@pytest.mark.parametrize(
    ("speed", "damaged", "status", "expected"),
    [
        (25_000, (0, 0), "ok", "25 Gbit/s, mtu 9000"),
        (0, (0, 0), "ok", "speed unknown, mtu 9000"),
        (25_000, (3, 0), "warn", "25 Gbit/s, 3 packet errors"),
        (25_000, (0, 3), "warn", "25 Gbit/s, 3 packet errors"),
    ],
)
def test_interfaces_that_are_up_are_shown_in_order(
    monkeypatch: pytest.MonkeyPatch, speed: int, damaged: tuple[int, int], status: str, expected: str
) -> None:
    link, down = (SimpleNamespace(isup=up, speed=speed, mtu=9000) for up in (True, False))
    links = {"eth2": down, "eth1": link, "lo": link, "eth0": link, "lo0": link}
    monkeypatch.setattr(checks.psutil, "net_if_stats", lambda: links)
    errors = SimpleNamespace(errin=damaged[0], errout=damaged[1])
    monkeypatch.setattr(checks.psutil, "net_io_counters", lambda pernic: {"eth1": errors})
    assert summaries(checks.check_links()) == [
        ("link", "ok", f"eth0: {expected.partition(',')[0]}, mtu 9000"),
        ("link", status, f"eth1: {expected}"),
    ]


@pytest.mark.parametrize(
    ("tools", "answer", "found"),
    [
        (("chronyc",), "Leap status     : Normal", "chronyc"),
        (("timedatectl",), "NTPSynchronized=yes", "timedatectl"),
        (("chronyc", "timedatectl"), "NTPSynchronized=yes", "chronyc"),
        (("timedatectl",), "NTPSynchronized=no", "no tool"),
        ((), "", "no tool"),
    ],
)
def test_the_clock_is_synchronised_by_a_tool(
    monkeypatch: pytest.MonkeyPatch, tools: tuple, answer: str, found: str
) -> None:
    monkeypatch.setattr(checks.shutil, "which", lambda name: name if name in tools else None)
    monkeypatch.setattr(checks.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=answer))
    (check,) = checks.check_clock()
    assert check.status == "ok" and found in check.found


def test_a_clock_tool_that_hangs_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(command: tuple, timeout: float, **_: object) -> None:
        assert timeout == checks.TOOL_TIMEOUT_S
        raise checks.subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(checks.shutil, "which", lambda name: name)
    monkeypatch.setattr(checks.subprocess, "run", hang)
    (check,) = checks.check_clock()
    assert check.status == "ok" and "no tool" in check.found


@pytest.mark.parametrize(("files", "status"), [(4096, "ok"), (4095, "warn")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, files: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "RLIM_INFINITY", resource.RLIM_INFINITY)
    assert summaries(checks.check_limits())[0] == ("open files", status, f"ulimit -n is {files}")


def test_locked_memory_is_checked_only_with_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65_536, 65_536))
    monkeypatch.setattr(Path, "is_dir", lambda folder: True)
    assert summaries(checks.check_limits())[1:] == [("locked memory", "warn", "ulimit -l is 64.00 KiB")]
    monkeypatch.setattr(Path, "is_dir", lambda folder: False)
    assert len(list(checks.check_limits())) == 1


def test_the_time_of_a_write_includes_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    written: list[int] = []

    def sync(descriptor: int) -> None:
        order.append("fsync")
        written.append(os.fstat(descriptor).st_size)

    def clock() -> float:
        order.append("clock")
        return float(len(order))

    monkeypatch.setattr(os, "fsync", sync)
    assert checks.measure_disk(tmp_path, clock) == checks.DISK_BYTES / 2
    assert (order, written) == (["clock", "fsync", "clock"], [checks.DISK_BYTES])


def test_a_node_has_all_checks_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("chips", "memory", "rdma", "links", "clock", "shm", "limits", "disk", "gpus"):
        check = checks.Check(name, "ok", "")
        monkeypatch.setattr(checks, f"check_{name}", lambda *_, check=check: [check])
    shown = ["versions", "chips", "memory", "rdma", "links", "clock", "shm", "limits", "disk"]
    assert [check.name for check in checks.check_node(tmp_path, "cpu")] == shown
    assert [check.name for check in checks.check_node(tmp_path, "cuda")] == ["versions", "chips", "gpus", *shown[2:]]


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\nGCC version", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release", "550.54.15"),
        ("something else", "unknown"),
        (None, "unknown"),
    ],
)
def test_the_version_of_the_driver_is_read(monkeypatch: pytest.MonkeyPatch, content: str | None, found: str) -> None:
    read = Path.read_text

    def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
        if str(path) != "/proc/driver/nvidia/version":
            return read(path, *args, **kwargs)
        if content is None:
            raise FileNotFoundError(path)
        return content

    monkeypatch.setattr(Path, "read_text", read_text)
    assert checks.driver() == found


def test_missing_shared_memory_and_ports_are_skipped(tmp_path: Path) -> None:
    assert list(checks.check_shm(tmp_path / "nothing")) == []
    assert list(checks.check_rdma(tmp_path / "nothing")) == []
    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    (unknown,) = checks.check_rdma(tmp_path)
    assert (unknown.name, unknown.status) == ("rdma", "warn") and "mlx5_0 port 1 " in unknown.found
