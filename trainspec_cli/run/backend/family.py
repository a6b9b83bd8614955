"""Find the processes of a launch as the descendants of the process that starts them.

torchrun starts each worker in a new session. When a process is killed, its children are reparented: on Linux to this
process, as long as a `Family` exists; on other systems to init, in which case they are found by their environment
variables."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from trainspec_cli.core.environment_names import GENERATION, GROUP, LAUNCH_ID
from trainspec_cli.run.backend import guard, processes
from trainspec_cli.run.backend.processes import EXEC_TIMEOUT_S, environ, parent_id
from trainspec_cli.run.backend.standby import take_standby
from trainspec_cli.run.folder.events import spoken_bytes
from trainspec_cli.run.job.job import Job, own_modules

ADOPTS = sys.platform == "linux"
PR_SET_CHILD_SUBREAPER = 36


class Family:
    """The processes of a job, or of one of its replica groups (only while a family for the entire job exists). Only
    `kill` blocks."""

    _open = 0
    """Number of jobs whose orphans this process adopts."""

    def __init__(self, job: Job, group: int | None = None):
        self._launch_id = job.launch_id
        self._marks = {LAUNCH_ID: job.launch_id} | ({} if group is None else {GROUP: str(group)})
        self._seen: set[psutil.Process] = set()
        if group is None:
            Family._open += 1
            _adopt_orphans(True)

    def members(self) -> list[psutil.Process]:
        """Return the live processes that have the job's variables in their environment, or that descend from such a
        process (or did when last seen)."""
        if not ADOPTS:
            of_launch = processes.members(self._launch_id, wait_s=0.0)
            return [process for process in of_launch if self._is_marked(environ(process))]
        found: dict[int, psutil.Process] = {}
        for process in psutil.Process().children(recursive=True):  # parents are listed before their children
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                is_known = process in self._seen or parent_id(process) in found
                variables = {} if is_known else environ(process)
                # A process in the middle of execve does not have an environment yet, so it may belong to the job.
                is_new = not variables and time.time() - process.create_time() < EXEC_TIMEOUT_S
                if is_known or is_new or self._is_marked(variables):
                    found[process.pid] = process
        self._seen.update(found.values())
        # Reap adopted processes that have ended; those started here are reaped by their Popen.
        for process in self._seen - set(found.values()):
            # A Popen whose child was reaped elsewhere reports exit code 0, so a failed torchrun would count as
            # successful.
            is_own = any(one.pid == process.pid and one.returncode is None for one in _started)
            if parent_id(process) == os.getpid() and not is_own:
                os.waitpid(process.pid, os.WNOHANG)
            # psutil also compares start times, because the system reuses process ids.
            if not process.is_running():
                self._seen.discard(process)
        return list(found.values())

    def workers(self) -> list[psutil.Process]:
        """Return the processes that have a rank, without their children."""
        return processes.workers_among(self.members())

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the workers; torchrun exits after them."""
        processes.terminate(self.workers())

    def kill_once(self) -> list[psutil.Process]:
        """Send SIGKILL to all processes; return those that were still alive."""
        left = self.members()
        processes.kill_once(left)
        return left

    def kill(self) -> list[psutil.Process]:
        """Send SIGKILL to all processes until none are left; return those still alive after `KILL_TIMEOUT_S`."""
        return processes.kill_all(self.members)

    def close(self) -> None:
        """Stop adopting orphans. Called once per job, when no processes are left."""
        Family._open -= 1
        if not Family._open:
            _adopt_orphans(False)

    def _is_marked(self, variables: Mapping[str, str]) -> bool:
        return all(variables.get(name) == value for name, value in self._marks.items())


def _adopt_orphans(adopt: bool) -> None:
    if ADOPTS:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


# Start a job's processes on this node, and the guard, which outlives their supervisor.


_started: list[subprocess.Popen[bytes]] = []
"""Processes whose exit codes have not been read yet."""


def start(
    command: Sequence[str],
    job: Job,
    pass_fds: tuple[int, ...] = (),
    open_output: Callable[[Path], int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a new session with the job's environment; its output goes to the job's torchrun log.
    `pass_fds`: file descriptors that it inherits. `open_output`: returns a different destination for the output, and
    must then write the log itself. A torchrun is run by this process's standby, if one is ready."""
    job.logs.mkdir(parents=True, exist_ok=True)
    standby = None if pass_fds or open_output else take_standby(command, job.environment, job.torchrun_log)
    if standby:
        _started[:] = [*(earlier for earlier in _started if earlier.returncode is None), standby]
        return standby
    with os.fdopen(open_output(job.torchrun_log), "wb") if open_output else job.torchrun_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )
    _started[:] = [*(earlier for earlier in _started if earlier.returncode is None), process]
    return process


def start_guard(job: Job) -> subprocess.Popen[bytes]:
    """Start the guard, before any other process of the job."""
    environment = {**os.environ, **job.environment, **own_modules()}
    del environment[LAUNCH_ID]  # the guard must not count itself among the processes it ends
    spoken = -1 if job.begins_unseen else spoken_bytes(job.run)
    about = (job.launch_id, job.stop_grace_s, job.root, job.environment.get(GENERATION, 0), spoken)
    return subprocess.Popen(
        [sys.executable, "-m", guard.__name__, *map(str, about)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
