"""One replica group on this host: its starts, one after another, and how each of them fares."""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import replace
from typing import Literal

import psutil

from trainspec_cli.launch import processes
from trainspec_cli.launch.command import LOOPBACK, torchrun_command
from trainspec_cli.launch.environment import GROUP, HOST, LIGHTHOUSE, START
from trainspec_cli.launch.failure import WorkerFailure, describe_exit, find_failures
from trainspec_cli.launch.job import Job
from trainspec_cli.launch.local import start
from trainspec_cli.rundir.events import EventTail

State = Literal["running", "waiting", "done", "gone"]
"""waiting: for its next start. done: it ended well. gone: it will not be started again."""


class ReplicaGroup:
    def __init__(self, number: int, size: int, job: Job, lighthouse: str, devices: str | None):
        """`job` is the whole run's; `devices`, of a GPU run, those that the group may see."""
        self.number, self.size, self._run_job = number, size, job
        self.ranks = range(number * size, (number + 1) * size)
        self._environment = {GROUP: str(number), LIGHTHOUSE: lighthouse, HOST: LOOPBACK}
        if devices is not None:
            self._environment["CUDA_VISIBLE_DEVICES"] = devices
        self.state: State = "waiting"
        self.start_at = 0.0
        self.starts_s: list[float] = []
        self.failures_in_a_row = 0
        self.job = job
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._workers: list[psutil.Process] = []
        self._events = EventTail(job.run.group_events(number, 0))
        self.stepped_at = 0.0
        """When it was last seen to have made a step; 0 before the first of this start."""
        self.retried_at = 0.0
        """When it was last seen to begin a step again, because an exchange had failed."""

    def start(self) -> None:
        """A fresh rendezvous: torchrun takes a free port of its own."""
        logs = self._run_job.logs / f"group{self.number:05d}_start{len(self.starts_s) + 1:03d}"
        self.job = replace(
            self._run_job,
            command=torchrun_command(self.size, logs, self._run_job.worker),
            environment={**self._run_job.environment, **self._environment, START: str(len(self.starts_s) + 1)},
            world_size=self.size,
            logs=logs,
            ranks=self.ranks,
        )
        self._torchrun = start(self.job.command, self.job)
        self._workers, self.stepped_at, self.retried_at = [], 0.0, 0.0
        self._events.read()  # those of the start before
        self.starts_s.append(time.monotonic())
        self.state = "running"

    def lost_worker(self) -> WorkerFailure | None:
        """A worker that has failed, or torchrun itself; torchrun would look at the others before it says so."""
        code = self.exit_code()
        if code is not None:
            return WorkerFailure(self.ranks[0], socket.gethostname(), describe_exit(code)) if code else None
        if len(self._workers) < self.size:
            self._workers = self._find_workers()
        for rank, worker in zip(self.ranks, self._workers, strict=False):
            code = processes.unread_exit_code(worker)
            if code:
                return WorkerFailure(rank, socket.gethostname(), describe_exit(code))
        return None

    def exit_code(self) -> int | None:
        assert self._torchrun is not None, "it was started"
        return self._torchrun.poll()

    def look(self, now_s: float) -> None:
        """Note whether it has made a step since the last look, or tried to."""
        kinds = {event["type"] for event in self._events.read()}
        if "step" in kinds:
            self.stepped_at, self.failures_in_a_row = now_s, 0
        if "retry" in kinds:
            self.retried_at = now_s

    def end(self) -> list[WorkerFailure]:
        """Kill what is left of this start; -> why it failed. What its workers wrote of it is put among the logs."""
        processes.kill_all(lambda: processes.members_of_group(self.job.launch_id, self.number))
        if self._torchrun is not None:
            self._torchrun.wait(processes.KILL_TIMEOUT_S)
        return find_failures(self.job)

    def put_errors_away(self) -> None:
        """What a start that is made good again said of its end is kept among its logs."""
        for rank in self.ranks:
            words = self.job.run.error(rank)
            if words.exists():
                words.rename(self.job.logs / words.name)

    def _find_workers(self) -> list[psutil.Process]:
        assert self._torchrun is not None, "it was started"
        try:
            return sorted(psutil.Process(self._torchrun.pid).children(), key=lambda process: process.pid)
        except psutil.NoSuchProcess:
            return []
