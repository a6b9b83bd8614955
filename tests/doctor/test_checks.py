from __future__ import annotations

import os
import platform
import resource
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainspec_cli.doctor import checks

Usage = namedtuple("Usage", "total used free")


def test_this_host_is_looked_at_from_all_sides(tmp_path: Path) -> None:
    found = checks.check_node(tmp_path, "cpu")
    assert {"versions", "chips", "clock", "open files", "disk"} <= {check.name for check in found}
    assert all(check.advice for check in found if check.status != "ok")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_host_without_the_gpu_it_should_have_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (chips,) = checks.check_chips("cuda")
    assert (chips.status, chips.found) == ("fail", "no GPU is visible")


@pytest.mark.parametrize(("free", "status"), [(2**26, "warn"), (2**34, "ok")])
def test_small_shared_memory_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(free, 0, free))
    (check,) = checks.check_shm(tmp_path)
    assert check.status == status
    assert ("--shm-size" in check.advice) == (status == "warn")


def test_few_open_files_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    first = next(iter(checks.check_limits()))
    assert (first.status, first.found) == ("warn", "ulimit -n is 1024")


def test_a_full_disk_fails_and_a_slow_one_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "measure_disk", lambda _: 1e6)
    (slow,) = checks.check_disk(tmp_path)
    assert slow.status == "warn"
    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage(2**40, 2**40, 0))
    (full,) = checks.check_disk(tmp_path)
    assert full.status == "fail"


def test_the_disk_is_measured_by_what_was_written(tmp_path: Path) -> None:
    clock = iter([0.0, 2.0])
    assert checks.measure_disk(tmp_path, lambda: next(clock)) == checks.DISK_BYTES / 2


def test_rdma_ports_that_are_down_are_warned_of(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
        (port / "rate").write_text("400 Gb/sec (4X NDR)")
    up, down = checks.check_rdma(tmp_path)
    assert (up.status, up.found) == ("ok", "mlx5_0 port 1: 400 Gb/sec (4X NDR)")
    assert (down.status, down.found) == ("warn", "mlx5_1 port 1 is 1: DOWN")


def test_the_disk_is_measured_in_no_file_that_a_stranger_has_put_there(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("words")
    (tmp_path / f".doctor-{platform.node()}-{os.getpid()}").symlink_to(tmp_path / "thesis")
    checks.measure_disk(tmp_path)
    assert (tmp_path / "thesis").read_text() == "words"


@pytest.mark.parametrize(("received", "sent"), [(3, 0), (0, 3)])
def test_a_link_that_damages_packets_either_way_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, received: int, sent: int
) -> None:
    link = SimpleNamespace(isup=True, speed=10_000, mtu=1500)
    monkeypatch.setattr(checks.psutil, "net_if_stats", lambda: {"eth0": link, "lo": link})
    errors = SimpleNamespace(errin=received, errout=sent)
    monkeypatch.setattr(checks.psutil, "net_io_counters", lambda pernic: {"eth0": errors, "lo": errors})
    (found,) = checks.check_links()
    assert (found.status, found.found) == ("warn", "eth0: 10 Gbit/s, 3 damaged packets")
