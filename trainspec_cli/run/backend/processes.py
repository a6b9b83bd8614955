"""Find and end a launch's processes from outside, by an environment variable that all of them inherit.

The callers of this module did not start the launch themselves: the guard, and the check for workers that a dead
supervisor has left behind. The search reads the environment of every process of this user, so it is done only when
needed. The process that starts a launch finds its processes by descent instead (`family.py`)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainspec_cli.core.environment_names import LAUNCH_ID, RANK, titled_rank

POLL_S = 0.1
KILL_TIMEOUT_S = 10.0
"""A killed process that still exists after this many seconds is stuck in the kernel (on a device or network disk)."""
EXEC_TIMEOUT_S = 1.0
"""Total time in seconds to wait for processes that have no environment, perhaps because they are in the middle of
execve."""
YOUNG_S = 10.0
"""A process older than this many seconds is not in the middle of execve."""

_without_environment: set[psutil.Process] = set()
"""Processes that never had an environment (slurmstepd clears its own); they are not waited for again."""


def members(launch_id: str, wait_s: float = EXEC_TIMEOUT_S) -> list[psutil.Process]:
    """Return every live process of the launch: torchrun, the workers, and their children. Waits for processes without
    an environment, for at most `wait_s` in total."""
    found: list[psutil.Process] = []
    # This user's processes except for this one and its ancestors, because callers only look for launches that they do
    # not belong to.
    ancestors = _with_ancestors(psutil.Process())
    unsure = []
    for process in psutil.process_iter():
        if process not in ancestors and process not in _without_environment:
            with contextlib.suppress(psutil.Error):
                if process.uids().real == os.getuid():
                    unsure.append(process)
    deadline = time.monotonic() + wait_s
    while unsure:
        environs = [(process, environ(process)) for process in unsure]
        found += [process for process, variables in environs if variables.get(LAUNCH_ID) == launch_id]
        unsure = [process for process, variables in environs if not variables and _may_be_in_exec(process)]
        if time.monotonic() > deadline:
            break
        time.sleep(0.001 if unsure else 0)
    # A process that has no environment yet would otherwise be missed.
    if wait_s:
        _without_environment.update(unsure)
    return found


def workers(launch_id: str) -> list[psutil.Process]:
    """Return the processes that have a rank, without their children."""
    return workers_among(members(launch_id))


def workers_among(processes: list[psutil.Process]) -> list[psutil.Process]:
    ranked = {process.pid: process for process in processes if rank_of(process) is not None}
    return [process for process in ranked.values() if parent_id(process) not in ranked]


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank of a worker within its torchrun; None for any other process, or for one that has ended."""
    try:
        rank = titled_rank(process.name())
    except psutil.Error:
        return None
    rank = environ(process).get(RANK) if rank is None else rank
    return None if rank is None else int(rank)


def terminate(processes: list[psutil.Process]) -> None:
    """Send SIGTERM to each live process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def kill(launch_id: str) -> list[psutil.Process]:
    """Send SIGKILL to all processes repeatedly until none are left; return those still alive after `KILL_TIMEOUT_S`."""
    return kill_all(lambda: members(launch_id))


def kill_all(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Like `kill`, for the processes that `find` returns."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (left := find()) and time.monotonic() < deadline:
        kill_once(left)
        time.sleep(POLL_S)
    return left


def kill_once(processes: list[psutil.Process]) -> None:
    """Send SIGKILL to each live process, without waiting."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def stop(launch_id: str, grace_s: float) -> None:
    """Ask the workers to exit (torchrun exits after them), wait, and then kill them."""
    terminate(workers(launch_id))
    deadline = time.monotonic() + grace_s
    while members(launch_id) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    kill(launch_id)


def unread_exit_code(process: psutil.Process) -> int | None:
    """Return the exit code of a process that has ended, if its parent has not read the code yet (Linux only); negative
    for a signal."""
    try:
        state, *_, status = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None


def environ(process: psutil.Process) -> dict[str, str]:
    """Return the environment; empty for a process that has ended, belongs to another user, or is in the middle of
    execve."""
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def parent_id(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None


def _with_ancestors(process: psutil.Process) -> set[psutil.Process]:
    """Return the process and its ancestors. A parent may end in the meantime, as the guard does when its supervisor
    dies."""
    while True:
        try:
            return {process, *process.parents()}
        except psutil.NoSuchProcess as error:
            if error.pid == process.pid:
                raise


def _may_be_in_exec(process: psutil.Process) -> bool:
    """Return whether a process may be in the middle of execve: it already has its program, but no environment yet.
    (Kernel threads have neither.)"""
    try:
        return time.time() - process.create_time() < YOUNG_S and bool(process.exe())
    except (psutil.Error, OSError):
        return False
