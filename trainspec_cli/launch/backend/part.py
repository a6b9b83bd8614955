"""The processes of one start of a replica group on one host: all of the group, or its part there."""

from __future__ import annotations

import os
import socket
import time

import psutil

from trainspec_cli.launch.backend import processes
from trainspec_cli.launch.backend.family import Family
from trainspec_cli.launch.backend.spawn import start
from trainspec_cli.launch.failure import WorkerFailure, describe_exit, find_listed
from trainspec_cli.launch.job.job import Job
from trainspec_cli.spec.results.plan import Plan


class Part:
    def __init__(self, job: Job, group: int):
        """Starts it. `job.ranks` are those that run here."""
        assert job.ranks is not None, "a group has ranks of its own"
        self.job, self._ranks = job, job.ranks
        self._family = Family(job, group)
        self._torchrun = start(job.command, job)
        self._workers: list[psutil.Process] = []
        self._given_up_at = 0.0
        self._is_gone = False

    def failure(self) -> WorkerFailure | None:
        """A worker that has failed, or torchrun itself; torchrun would look at the others before it says so."""
        code = self._torchrun.poll()
        if code is not None:
            return self._listed_failure(code) if code else None
        if len(self._workers) < len(self._ranks):
            self._workers = self._find_workers()
        for rank, worker in zip(self._ranks, self._workers, strict=False):
            code = processes.unread_exit_code(worker)
            if code:
                return _failed(rank, describe_exit(code))
        return None

    def is_done(self) -> bool:
        return self._torchrun.poll() == 0

    def end(self) -> None:
        """Kill what is left of it; `is_gone` says when that is done."""
        self._given_up_at = time.monotonic() + processes.KILL_TIMEOUT_S
        self._family.kill_once()

    def is_gone(self) -> bool:
        """Whether nothing is left after `end`, but for processes that hang in the kernel."""
        if not self._is_gone:
            left = self._family.kill_once()
            self._is_gone = self._torchrun.poll() is not None and not left
            self._is_gone = self._is_gone or time.monotonic() > self._given_up_at
        return self._is_gone

    def _listed_failure(self, code: int) -> WorkerFailure:
        """torchrun ends with 1 whatever its workers ended with; its log lists their exit codes."""
        listed = find_listed(self.job)
        return listed[0] if listed else _failed(self._ranks[0], f"lost its torchrun, which {describe_exit(code)}")

    def _find_workers(self) -> list[psutil.Process]:
        try:
            return sorted(psutil.Process(self._torchrun.pid).children(), key=lambda process: process.pid)
        except psutil.NoSuchProcess:
            return []


def _failed(rank: int, summary: str) -> WorkerFailure:
    return WorkerFailure(rank, socket.gethostname(), summary)


def start_folder(group: int, number: int) -> str:
    """Of one start's logs."""
    return f"group{group:05d}_start{number:03d}"


def ranks_of(plan: Plan, group: int) -> range:
    """Among all of the run's."""
    return range(group * plan.group_size, (group + 1) * plan.group_size)


def devices_of(plan: Plan, group: int) -> dict[str, str]:
    """The variable that shows a group its GPUs alone, of those shown to this process, where several share a host."""
    per_host = plan.replica_groups // plan.num_nodes
    if plan.device != "cuda" or per_host < 2:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(per_host * plan.group_size)))
    first = group % per_host * plan.group_size
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[first : first + plan.group_size])}
