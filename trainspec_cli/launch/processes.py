"""Find, ask and end the processes of one launch.

They are known by an environment variable that all of them inherit, whatever became of their parents: torchrun
starts every worker in a session of its own, and what a killed worker had started belongs to init.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainspec_cli.launch.environment import GROUP, LAUNCH_ID

POLL_S = 0.1
KILL_TIMEOUT_S = 10.0
"""A killed process that is still there after this hangs in the kernel (a device, a network disk)."""
EXEC_TIMEOUT_S = 1.0
"""So long a process in the midst of its exec is waited for."""
YOUNG_S = 10.0
"""One that is older is not in the midst of it."""


def members(launch_id: str) -> list[psutil.Process]:
    """Every living process of the launch: torchrun, the workers, and what those started."""
    return [process for process in psutil.process_iter() if _environ(process).get(LAUNCH_ID) == launch_id]


def members_of_group(launch_id: str, group: int) -> list[psutil.Process]:
    """Those of one replica group."""
    return [process for process in members(launch_id) if _environ(process).get(GROUP) == str(group)]


def workers(launch_id: str) -> list[psutil.Process]:
    """The processes that have a rank, without those they started."""
    ranked = {process.pid: process for process in members(launch_id) if "RANK" in _environ(process)}
    return [process for process in ranked.values() if _parent_id(process) not in ranked]


def ask_to_stop(launch_id: str) -> None:
    """SIGTERM to the workers; torchrun ends by itself when they have ended."""
    for worker in workers(launch_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            worker.terminate()


def kill(launch_id: str) -> list[psutil.Process]:
    """SIGKILL to everything, again and again until nothing is left; returns what outlived `KILL_TIMEOUT_S`."""
    return kill_all(lambda: members(launch_id))


def kill_all(find: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """As `kill`, whatever `find` finds."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while (left := find()) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)
    return left


def unread_exit_code(process: psutil.Process) -> int | None:
    """Of one that has ended, but whose parent has not looked yet (Linux alone can tell); negative for a signal."""
    try:
        state, *_, status = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except (OSError, ValueError):
        return None
    return os.waitstatus_to_exitcode(int(status)) if state == "Z" else None


def stop(launch_id: str, grace_s: float) -> None:
    """Ask, wait, kill; with no time to wait for, kill."""
    if grace_s:
        ask_to_stop(launch_id)
    deadline = time.monotonic() + grace_s
    while members(launch_id) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    kill(launch_id)


def _environ(process: psutil.Process) -> dict[str, str]:
    """Empty for processes that have ended or belong to others; one that is just being started is waited for."""
    deadline = time.monotonic() + EXEC_TIMEOUT_S
    try:
        while not (environ := process.environ()) and _may_be_in_exec(process) and time.monotonic() < deadline:
            time.sleep(0.001)
    except (psutil.Error, OSError):
        return {}
    return environ


def _may_be_in_exec(process: psutil.Process) -> bool:
    """In the midst of execve a process has its program already, and no environment yet; kernel threads have neither."""
    return time.time() - process.create_time() < YOUNG_S and bool(process.exe())


def _parent_id(process: psutil.Process) -> int | None:
    try:
        return process.ppid()
    except psutil.NoSuchProcess:
        return None
