"""Runs a job on this host."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from trainspec_cli.launch import guard, processes
from trainspec_cli.launch.environment import LAUNCH_ID
from trainspec_cli.launch.job import Job
from trainspec_cli.rundir import generations


class LocalExecutor:
    def submit(self, job: Job) -> LocalProcesses:
        """Start torchrun in a session of its own, so that Ctrl-C reaches the supervisor alone."""
        job = own_run(job)
        job.logs.mkdir(parents=True, exist_ok=True)
        return LocalProcesses(job)


class LocalProcesses:
    def __init__(self, job: Job):
        self._job = job
        self._guard = start_guard(job)
        self._torchrun = start(job.command, job)

    @property
    def generation(self) -> int:
        return int(self._job.environment[generations.GENERATION])

    def exit_code(self) -> int | None:
        return self._torchrun.poll()

    def anything_left(self) -> bool:
        return self.exit_code() is None or bool(processes.members(self._job.launch_id))

    def ask_to_stop(self) -> None:
        processes.ask_to_stop(self._job.launch_id)

    def end(self) -> tuple[int, ...]:
        """Kill what is left, then send the guard home."""
        left = processes.kill(self._job.launch_id)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(processes.KILL_TIMEOUT_S)
        with contextlib.suppress(BrokenPipeError):
            self._guard.communicate(guard.DONE)
        return tuple(process.pid for process in left)


def own_run(job: Job) -> Job:
    """The run belongs to this start from now on, unless the job is a part of one that owns it."""
    if generations.GENERATION in job.environment:
        return job
    return replace(job, environment={**job.environment, generations.GENERATION: str(generations.begin(job.run))})


def start(command: Sequence[str], job: Job) -> subprocess.Popen[bytes]:
    """In a session of its own, with the job's environment; what it says goes to the job's torchrun log."""
    job.logs.mkdir(parents=True, exist_ok=True)
    with job.torchrun_log.open("ab") as log:
        return subprocess.Popen(
            command,
            env={**os.environ, **job.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
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
