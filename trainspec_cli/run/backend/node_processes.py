"""The processes of a run on one node: of each replica group its torchrun, or its part of one, and the workers below it.

The local backend and a node's agent both hold one; it reports in the messages that agents send.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil

from trainspec_cli.core.environment_names import GENERATION, GROUP, START
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import guard, processes
from trainspec_cli.run.backend.family import Family
from trainspec_cli.run.backend.spawn import start, start_guard
from trainspec_cli.run.channel.messages import GroupExited, ProcessMessage, WorkerExited, WorkersOrphaned
from trainspec_cli.run.failure import describe_exit, find_listed
from trainspec_cli.run.folder.generations import note_stop
from trainspec_cli.run.job.job import Job, node_command, torchrun_command
from trainspec_cli.run.job.machine import NodePlace, count_oom_kills, usable_memory_bytes


class PassedThrough(Protocol):
    """Passes what a program prints through to this terminal as it is, and keeps the program's log."""

    on_first: Callable[[], None]
    """Called before the first byte is shown."""

    def open(self, log: Path) -> int:
        """Return the descriptor that one start of the program prints to."""

    def look(self) -> None:
        """Show what has come since the last look."""

    def begin_line(self) -> None:
        """End a line that the program has begun, before something else is printed."""

    def finish(self) -> None:
        """Wait until all that the program has printed is in its log, after its end."""

    def close(self) -> None: ...


class NodeProcesses:
    def __init__(
        self, job: Job, plan: Plan | None, place: NodePlace | None = None, passed: PassedThrough | None = None
    ):
        """`job` belongs to a generation; of several nodes it is this one's, at `place`. `passed`: shows the output."""
        self._job = job
        self._plan = plan
        self._place = place
        self._passed = passed
        self._guard, self._family = start_guard(job), Family(job)
        self._starts: dict[int, _GroupProcesses] = {}

    def start(self, group: int, number: int) -> None:
        """Start torchrun in a session of its own, so that Ctrl-C reaches the supervisor alone."""
        job = group_job(self._job, self._plan, group, number, self._place)
        family = self._family if job.ranks is None else Family(job, group)
        self._starts[group] = _GroupProcesses(job, family, group, number, self._passed)

    def poll(self) -> list[ProcessMessage]:
        return [message for processes_of in self._starts.values() for message in processes_of.poll()]

    def stop(self, group: int | None = None) -> None:
        """Ask workers to stop, as `RunBackend.stop` does."""
        if group is None:
            note_stop(self._job.run, int(self._job.environment[GENERATION]))
            self._family.ask_to_stop()
        elif group in self._starts:
            self._starts[group].family.ask_to_stop()

    def members(self) -> list[psutil.Process]:
        """Return the processes that live."""
        return self._family.members()

    def kill(self, group: int) -> None:
        """`poll` reports when nothing is left."""
        if group in self._starts:
            self._starts[group].kill()

    def record_hang(self, late: tuple[int, ...]) -> None:
        """Workers of a recipe have written down themselves where they stand."""

    def close(self) -> tuple[int, ...]:
        """Kill what is left on this node, then end the guard; -> the ids of what could not be killed."""
        left = close_family(self._family, self._guard)
        for processes_of in self._starts.values():
            processes_of.wait()
        return left


class _GroupProcesses:
    """One start of a group."""

    def __init__(self, job: Job, family: Family, group: int, number: int, passed: PassedThrough | None):
        self._job = job
        self.family = family
        self._group = group
        self._number = number
        self._passed = passed
        self._oom_kills = count_oom_kills()
        self._torchrun = start(job.command, job, open_output=passed.open if passed else None)
        self._workers: list[psutil.Process] = []
        self._failed = self._orphaned = self._killed = self._exited = False
        self._exit_code: int | None = None
        """torchrun's, where it ended by itself."""
        self._give_up_at_s = math.inf

    def poll(self) -> Iterator[ProcessMessage]:
        if self._exited:
            return
        code = self._torchrun.poll()
        if not self._killed:
            self._exit_code = code
            yield from self._find_failure(code)
        if self._killed:
            left = self.family.kill_once()
        else:
            left = self.family.members() if code is not None else []
        given_up = time.monotonic() > self._give_up_at_s
        if given_up or (code is not None and not left):
            self._exited = True
            yield self._describe_exit(left)
        elif left and not self._killed and not self._orphaned:
            self._orphaned = True
            yield WorkersOrphaned(self._group, self._number)

    def _describe_exit(self, left: list[psutil.Process]) -> GroupExited:
        if self._passed:
            self._passed.finish()  # its log says why it has ended
        ended = GroupExited(self._group, self._number, self._exit_code, tuple(process.pid for process in left))
        kills = count_oom_kills() - self._oom_kills
        return replace(ended, oom_kills=kills, memory_bytes=usable_memory_bytes()) if kills > 0 else ended

    def kill(self) -> None:
        """Kill what is left again and again, until nothing is, or processes have hung in the kernel for long."""
        if not self._killed:
            self._killed = True
            self._exit_code = self._torchrun.poll()
            self._give_up_at_s = time.monotonic() + processes.KILL_TIMEOUT_S
            self.family.kill_once()

    def wait(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(processes.KILL_TIMEOUT_S)

    def _find_failure(self, code: int | None) -> Iterator[ProcessMessage]:
        """Find a failed worker of a group before its torchrun reports it, which looks at the others first; in a run of
        one group they all have the time to report."""
        if self._failed:
            return
        failure = self._find_failed_worker() if code is None else self._explain_end(code) if code else None
        if failure:
            self._failed = True
            yield WorkerExited(self._group, self._number, *failure)

    def _find_failed_worker(self) -> tuple[int, str, bool] | None:
        ranks = self._job.ranks or ()
        if len(self._workers) < len(ranks):
            self._workers = []
            with contextlib.suppress(psutil.NoSuchProcess):  # torchrun has ended meanwhile: the next poll shows that
                children = psutil.Process(self._torchrun.pid).children()
                self._workers = sorted(children, key=lambda process: process.pid)
        for rank, worker in zip(ranks, self._workers, strict=False):
            if code := processes.unread_exit_code(worker):
                return rank, describe_exit(code), code == -signal.SIGKILL
        return None

    def _explain_end(self, code: int) -> tuple[int, str, bool]:
        """Return the rank that failed, how, and whether by SIGKILL. torchrun ends with 1 whatever its workers ended
        with; its log lists their exit codes."""
        if listed := find_listed(self._job):
            return listed[0].rank, listed[0].summary, listed[0].was_killed
        lost = f"lost its torchrun, which {describe_exit(code)}"
        return (self._job.ranks or (0,))[0], lost, code == -signal.SIGKILL


def close_family(family: Family, guarding: subprocess.Popen[bytes]) -> tuple[int, ...]:
    """Kill what is left of a job on this node, then end its guard; -> the ids of what could not be killed."""
    left = family.kill()
    family.close()
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guarding.communicate(guard.DONE, timeout=processes.KILL_TIMEOUT_S)
    return tuple(process.pid for process in left)


def group_job(job: Job, plan: Plan | None, group: int, number: int, place: NodePlace | None = None) -> Job:
    """Return the job of one start of a replica group, or of its part on the node at `place`; a run of one group is the
    job itself."""
    if plan is None or plan.replica_groups == 1:
        return job
    name = start_folder(group, number)
    ranks = ranks_of(plan, group)
    if place is None:
        logs = job.logs / name
        command = torchrun_command(len(ranks), logs, job.worker)
    else:
        nodes = plan.nodes_of_group(group)
        here = NodePlace(place.node - nodes.start, len(nodes), place.head)
        processes_here = len(ranks) // len(nodes)
        ranks = ranks[here.node * processes_here : (here.node + 1) * processes_here]
        logs = job.logs.parent / name / job.logs.name
        command = node_command(here, name, processes_here, logs, job.worker)
    environment = {**job.environment, GROUP: str(group), START: str(number), **devices_of(plan, group)}
    return replace(job, command=command, environment=environment, world_size=plan.group_size, logs=logs, ranks=ranks)


def start_folder(group: int, number: int) -> str:
    """Return the name of the folder of one start's logs."""
    return f"group{group:05d}_start{number:03d}"


def ranks_of(plan: Plan, group: int) -> range:
    """Return a group's ranks, among all of the run's."""
    return range(group * plan.group_size, (group + 1) * plan.group_size)


def devices_of(plan: Plan, group: int) -> dict[str, str]:
    """Return the variable that shows a group its GPUs alone, of those shown to this process, where several groups share
    a node."""
    per_node = plan.replica_groups // plan.num_nodes
    if plan.device != "cuda" or per_node < 2:
        return {}
    shown = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(per_node * plan.group_size)))
    first = group % per_node * plan.group_size
    return {"CUDA_VISIBLE_DEVICES": ",".join(shown.split(",")[first : first + plan.group_size])}
