"""Memory that a process has to share with its own swap: a control group with a limit (version 1 or 2), and a swap file.

Memory that a process had before it joined the group does not count; later allocations do.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

import psutil

VERSION_1, VERSION_2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
SWAP_BYTES = 2**30


class MemoryLimit:
    """Beyond `limit_bytes` the least used pages of what it holds go to a swap file of its own."""

    def __init__(self, limit_bytes: int):
        descriptor, name = tempfile.mkstemp(prefix="trainspec-swap-")
        os.posix_fallocate(descriptor, 0, SWAP_BYTES)
        os.close(descriptor)
        self._swap = Path(name)
        subprocess.run(["mkswap", name], check=True, capture_output=True)
        subprocess.run(["swapon", name], check=True, capture_output=True)
        self._folder = _root() / f"trainspec-memory-{os.getpid()}"
        self._folder.mkdir()
        limit = "memory.limit_in_bytes" if _root() == VERSION_1 else "memory.high"
        (self._folder / limit).write_text(str(limit_bytes))

    def hold(self, process: psutil.Process) -> None:
        (self._folder / "cgroup.procs").write_text(str(process.pid))

    def remove(self) -> None:
        """Remove the group. Its processes have ended, or may continue without a limit."""
        for pid in (self._folder / "cgroup.procs").read_text().split():
            (_root() / "cgroup.procs").write_text(pid)
        self._folder.rmdir()
        subprocess.run(["swapoff", str(self._swap)], check=True, capture_output=True)
        self._swap.unlink()


def _root() -> Path:
    return VERSION_1 if (VERSION_1 / "memory.limit_in_bytes").exists() else VERSION_2
