"""The names of this node: its own in the job, and its CPU's."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


def node_name() -> str:
    """Return the name by which Slurm knows this node, else its hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the maker's name for the CPU, else its architecture."""
    return _cpu_line("model name", cpuinfo) or platform.processor() or platform.machine()


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the instructions that the CPU has; empty where the system does not list them (macOS)."""
    return frozenset(_cpu_line("flags", cpuinfo).split())


def _cpu_line(key: str, cpuinfo: Path) -> str:
    """Return the first value of `key`; empty where there is none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
