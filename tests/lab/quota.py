"""A share of the processor for a process and all that it starts: a control group with a quota (version 1 or 2)."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import psutil

VERSION_1, VERSION_2 = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")
PERIOD_US, LEAST_QUOTA_US = 20_000, 1_000
"""Quotas are for the usual period; the kernel accepts none below this one, so a small share has a longer period."""
REMOVE_TIMEOUT_S = 10.0


def lacking() -> str:
    """Why there can be no quota here; empty where there can."""
    if os.geteuid() != 0:
        return "control groups need root"
    if (VERSION_1 / "cpu.cfs_quota_us").exists() or _controls_cpu(VERSION_2):
        return "" if os.access(_root(), os.W_OK) else f"{_root()} cannot be written"
    return "no control group here limits the processor"


class Quota:
    def __init__(self, percent: float):
        self._folder = _root() / f"trainspec-{os.getpid()}"
        self._folder.mkdir()
        period_us = max(PERIOD_US, round(100 * LEAST_QUOTA_US / percent))
        quota_us = max(LEAST_QUOTA_US, round(period_us * percent / 100))
        if _root() == VERSION_1:
            (self._folder / "cpu.cfs_period_us").write_text(str(period_us))
            (self._folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self._folder / "cpu.max").write_text(f"{quota_us} {period_us}")

    def hold(self, process: psutil.Process) -> None:
        (self._folder / "cgroup.procs").write_text(str(process.pid))

    def remove(self) -> None:
        """What it held, and what that has started since, is held no more."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        while self._folder.is_dir():
            for pid in (self._folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    (_root() / "cgroup.procs").write_text(pid)
            try:
                self._folder.rmdir()
            except OSError:  # busy: somebody in it has just begun, or has not quite ended
                assert time.monotonic() < deadline, f"{self._folder} cannot be removed"
                time.sleep(0.1)


def _root() -> Path:
    return VERSION_1 if (VERSION_1 / "cpu.cfs_quota_us").exists() else VERSION_2


def _controls_cpu(root: Path) -> bool:
    settings = root / "cgroup.subtree_control"
    return settings.is_file() and "cpu" in settings.read_text().split()
