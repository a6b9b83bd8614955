"""Start processes of a job on this node, and the guard that outlives their supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from trainspec_cli.core.environment_names import GENERATION, LAUNCH_ID
from trainspec_cli.run.backend import guard
from trainspec_cli.run.folder.events import spoken_bytes
from trainspec_cli.run.job.job import Job, own_modules

_started: list[subprocess.Popen[bytes]] = []
"""Processes whose end has not been read yet."""


def start(
    command: Sequence[str],
    job: Job,
    pass_fds: tuple[int, ...] = (),
    open_output: Callable[[Path], int] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, with the job's environment; its output goes to the job's torchrun
    log. `pass_fds`: descriptors that it inherits. `open_output` returns where its output goes instead, and sees to it
    that the log has it too."""
    job.logs.mkdir(parents=True, exist_ok=True)
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


def is_own_child(pid: int) -> bool:
    """Return whether `start` has started it, and its end is still to be read."""
    return any(process.pid == pid and process.returncode is None for process in _started)


def start_guard(job: Job) -> subprocess.Popen[bytes]:
    """Start the guard, before anything of the job is started."""
    environment = {**os.environ, **job.environment, **own_modules()}
    del environment[LAUNCH_ID]  # it must not count itself among those it ends
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
