"""Starts processes of a job on this host, and the guard that outlives their supervisor."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

from trainspec_cli.launch import guard
from trainspec_cli.launch.environment import LAUNCH_ID
from trainspec_cli.launch.job import Job


def start(command: Sequence[str], job: Job, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    """In a session of its own, with the job's environment; what it says goes to the job's torchrun log. `pass_fds`:
    descriptors that it inherits."""
    job.logs.mkdir(parents=True, exist_ok=True)
    with job.torchrun_log.open("ab") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=pass_fds,
        )


def start_guard(job: Job) -> subprocess.Popen[bytes]:
    environment = {**os.environ, **job.environment}
    del environment[LAUNCH_ID]  # it must not count itself among those it ends
    return subprocess.Popen(
        [sys.executable, "-m", guard.__name__, job.launch_id, str(job.stop_grace_s)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
