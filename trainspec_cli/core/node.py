"""The name of this node in the job, the name of its CPU, and the user's cache and state folders."""

from __future__ import annotations

import errno
import os
import platform
import socket
from pathlib import Path

from trainspec_cli.core.environment_names import CACHE
from trainspec_cli.core.errors import MachineError
from trainspec_cli.core.reading.files import expand
from trainspec_cli.core.trust import check_folder, make_folder

CPUINFO = Path("/proc/cpuinfo")


def node_name() -> str:
    """Return Slurm's name of this node, else its hostname."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def cpu_name(cpuinfo: Path = CPUINFO) -> str:
    """Return the vendor's name of the CPU, else its architecture."""
    return _cpu_line("model name", cpuinfo) or platform.processor() or platform.machine()


def cpu_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Return the CPU's instruction-set flags; empty if the system does not list them (macOS)."""
    return frozenset(_cpu_line("flags", cpuinfo).split())


def _cpu_line(key: str, cpuinfo: Path) -> str:
    """Return the first value of `key`, or ""."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


# The user's cache (prepared data, measurements of machines, profiles of clusters, memory limits) and the folder of the
# list of runs.


CHOOSE_ANOTHER = f"choose your own folder for prepared data and measured figures: {CACHE}=FOLDER"


def cache_dir() -> Path:
    """Return `$TRAINSPEC_CACHE`, else `$XDG_CACHE_HOME/trainspec`, else `~/.cache/trainspec`; it may not exist yet.

    Raises MachineError if it belongs to another user or every user can write it: a run would train on data that others
    put there.
    """
    folder = _location()
    if folder.exists():
        check_folder(folder, CHOOSE_ANOTHER)
    return folder


def state_dir() -> Path:
    """Return `$TRAINSPEC_CACHE`, else `$XDG_STATE_HOME/trainspec`, else `~/.local/state/trainspec`, for data that
    cannot be restored from elsewhere; it may not exist yet. Raises MachineError as `cache_dir` does."""
    if os.environ.get(CACHE):
        return cache_dir()
    base = os.environ.get("XDG_STATE_HOME")
    folder = (Path(base) if base else Path.home() / ".local" / "state") / "trainspec"
    if folder.exists():
        check_folder(folder, CHOOSE_ANOTHER)
    return folder


def make_cache() -> None:
    """Create the cache, accessible to this user only, if it does not exist.

    Raises MachineError as `cache_dir` does, and if it cannot be written.
    """
    folder = _location()
    try:
        make_folder(folder, CHOOSE_ANOTHER)
    except OSError as error:
        raise cannot_write(folder, error) from error


def _location() -> Path:
    if chosen := os.environ.get(CACHE):
        return expand(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "trainspec"


def cannot_write(folder: Path, error: OSError) -> MachineError:
    # A full disk and a forbidden folder need different remedies.
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MachineError(
            f"no space left to write {folder}",
            code="disk_full",
            hint=f"free space on the disk of {folder.parent}, or choose another folder ({CACHE}=FOLDER)",
        )
    return MachineError(
        f"cannot write {folder}: {error.strerror or error}",
        code="cannot_write",
        hint=f"choose a folder that you can write to ({CACHE}=FOLDER for prepared data)",
    )
