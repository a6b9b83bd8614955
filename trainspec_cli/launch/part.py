"""The processes of one start of a replica group on one host: all of the group, or its part there."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

import psutil

from trainspec_cli.launch import processes
from trainspec_cli.launch.failure import WorkerFailure, describe_exit
from trainspec_cli.launch.job import Job
from trainspec_cli.launch.spawn import start
from trainspec_cli.spec.plan import Plan


class Part:
    def __init__(self, job: Job, group: int):
        """Starts it. `job.ranks` are those that run here."""
        assert job.ranks is not None, "a group has ranks of its own"
        self.job, self._group, self._ranks = job, group, job.ranks
        self._torchrun = start(job.command, job)
        self._workers: list[psutil.Process] = []

    def failure(self) -> WorkerFailure | None:
        """A worker that has failed, or torchrun itself; torchrun would look at the others before it says so."""
        code = self._torchrun.poll()
        if code is not None:
            return _failed(self._ranks[0], code) if code else None
        if len(self._workers) < len(self._ranks):
            self._workers = self._find_workers()
        for rank, worker in zip(self._ranks, self._workers, strict=False):
            code = processes.unread_exit_code(worker)
            if code:
                return _failed(rank, code)
        return None

    def is_done(self) -> bool:
        return self._torchrun.poll() == 0

    def end(self) -> None:
        """Kill what is left of it."""
        processes.kill_all(lambda: processes.members_of_group(self.job.launch_id, self._group))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(processes.KILL_TIMEOUT_S)

    def is_gone(self) -> bool:
        return self._torchrun.poll() is not None

    def _find_workers(self) -> list[psutil.Process]:
        try:
            return sorted(psutil.Process(self._torchrun.pid).children(), key=lambda process: process.pid)
        except psutil.NoSuchProcess:
            return []


def _failed(rank: int, code: int) -> WorkerFailure:
    return WorkerFailure(rank, socket.gethostname(), describe_exit(code))


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
