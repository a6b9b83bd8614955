"""The processes of a run on one node, and the backend of a run whose processes are all on this node.

A node runs one torchrun for each replica group, or for its part of a group; that torchrun starts the workers. The local
backend and the nodes' agents both use `NodeProcesses`, which reports in the form of the messages that agents send."""

from __future__ import annotations

import contextlib
import math
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import psutil

from trainspec_cli.core.environment_names import GENERATION, SECRET_FILE, SUPERVISOR
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend import guard, processes
from trainspec_cli.run.backend.family import Family, start, start_guard
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.backend.observe import GroupStart, RendezvousWatch, RunningStart, poll_starts
from trainspec_cli.run.backend.standby import keep_standby
from trainspec_cli.run.channel.messages import GroupExited, HangFound, ProcessMessage, WorkerExited, WorkersOrphaned
from trainspec_cli.run.failure import describe_exit, find_listed
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.generations import create_secret, note_stop
from trainspec_cli.run.job.job import LOOPBACK, Job, group_job
from trainspec_cli.run.job.machine import BACKLOG, NodePlace, count_oom_kills, usable_memory_bytes
from trainspec_cli.run.job.node_faults import FaultWatch
from trainspec_cli.run.recovery.run_state import Event, PresenceChanged
from trainspec_cli.run.rendezvous.address import Rendezvous

HERE = 0
"""The number of this node, which is the only node."""
MOST_PATH_BYTES = 60
"""Maximum length of the path of the folder for temporary files: the path of a Unix socket may have at most 104 bytes on
macOS (108 on Linux)."""


class LocalBackend:
    def __init__(self, job: Job, plan: Plan | None):
        # This must come first: from now on, processes of an earlier start write nothing more, even if some are still
        # alive.
        self.generation = generations.begin(job.run)
        self._job = replace(job, environment={**job.environment, GENERATION: str(self.generation)})
        self._plan = plan
        self._groups = plan.replica_groups if plan else 1
        self._rendezvous: Rendezvous | None = None
        self._rendezvous_watch: RendezvousWatch | None = None
        self.hub: Hub | None = None
        self._private = Path()
        """A folder that only this user can read, which contains the job's secret and the hub's socket."""
        if plan:
            self._open_hub(plan)
        self._processes = NodeProcesses(self._job, plan)
        self._starts: dict[int, RunningStart] = {}
        self._unreported: list[Event] = [PresenceChanged(group, "there") for group in range(self._groups)]

    def start(self, group: int, number: int) -> None:
        self._starts[group] = GroupStart(self._job, self._plan, group, number)
        self._processes.start(group, number)

    def poll(self) -> list[Event]:
        events = self._unreported
        self._unreported = []
        if self.hub:
            self.hub.poll()
        for message in self._processes.poll():
            events += self._starts[message.group].hear(HERE, socket.gethostname(), message)
        events += poll_starts(self._starts)
        return events + (self._rendezvous_watch.poll() if self._rendezvous_watch else [])

    def stop(self, group: int | None = None) -> None:
        self._processes.stop(group)

    def kill(self, group: int | None = None) -> tuple[int, ...]:
        if group is not None:
            self._processes.kill(group)
            return ()
        left_behind = self._processes.close()
        if self._rendezvous:
            self._rendezvous.close()
        if self.hub:
            self.hub.close()
            shutil.rmtree(self._private, ignore_errors=True)
        return left_behind

    def _open_hub(self, plan: Plan) -> None:
        """Open the hub's socket for the workers. Replica groups rendezvous at a server, and the processes of a single
        group through a file."""
        is_long = len(tempfile.gettempdir()) > MOST_PATH_BYTES
        self._private = Path(tempfile.mkdtemp(prefix="trainspec-", dir="/tmp" if is_long else None))
        secret_file = self._private / "secret"
        address = self._private / "hub"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(address))
        listener.listen(BACKLOG)
        limits = plan.spec.run
        self.hub = Hub(0, create_secret(secret_file), listener, limits.node_timeout_s, limits.join_timeout_s)
        environment = {SUPERVISOR: str(address), SECRET_FILE: str(secret_file)}
        if self._groups > 1:
            self._rendezvous = Rendezvous(self._job, plan.spec.resilience, secret_file, LOOPBACK)
            self._rendezvous_watch = RendezvousWatch(self._rendezvous, self._job.run, plan)
            environment |= self._rendezvous.environment
        self._job = replace(self._job, environment={**self._job.environment, **environment})


class PassedThrough(Protocol):
    """Copies a program's output to this terminal unchanged, and keeps the program's log."""

    on_first: Callable[[], None]
    """Called before the first byte is printed."""

    def open(self, log: Path) -> int:
        """Return the file descriptor for the output of one start of the program."""

    def look(self) -> None:
        """Print the output that the program has written since the last call."""

    def begin_line(self) -> None:
        """End an unfinished line of the program's output before something else is printed."""

    def finish(self) -> None:
        """After the program has exited, wait until all of its output is in its log."""

    def close(self) -> None: ...


class NodeProcesses:
    def __init__(
        self,
        job: Job,
        plan: Plan | None,
        place: NodePlace | None = None,
        passed: PassedThrough | None = None,
        *,
        keeps_standby: bool = False,
    ):
        """`job`: the job of one generation or, in a multi-node run, its part for the node at `place`. `passed`: copies
        the output to the terminal. `keeps_standby`: whether to prepare later starts (`standby.py`)."""
        self._keeps_standby = keeps_standby
        self._job = job
        self._plan = plan
        self._place = place
        self._passed = passed
        self._guard, self._family = start_guard(job), Family(job)
        self._starts: dict[int, _GroupProcesses] = {}

    def start(self, group: int, number: int) -> None:
        """Start torchrun in a new session, so that Ctrl-C reaches only the supervisor."""
        job = group_job(self._job, self._plan, group, number, self._place)
        family = self._family if job.ranks is None else Family(job, group)
        self._starts[group] = _GroupProcesses(job, family, group, number, self._passed)

    def poll(self) -> list[ProcessMessage]:
        if self._keeps_standby and self._starts:
            keep_standby(self._job.environment)
        return [message for processes_of in self._starts.values() for message in processes_of.poll()]

    def stop(self, group: int | None = None) -> None:
        """Ask workers to stop, as in `RunBackend.stop`."""
        if group is None:
            note_stop(self._job.run, int(self._job.environment[GENERATION]))
            self._family.ask_to_stop()
        elif group in self._starts:
            self._starts[group].family.ask_to_stop()

    def members(self) -> list[psutil.Process]:
        """Return the live processes."""
        return self._family.members()

    def kill(self, group: int) -> None:
        """Kill a group; `poll` reports when no processes are left."""
        if group in self._starts:
            self._starts[group].kill()

    def record_hang(self, hang: HangFound) -> None:
        """Do nothing, because the engine's workers have already recorded their position in the run folder."""

    def close(self) -> tuple[int, ...]:
        """Kill whatever is left on this node, then end the guard; return the ids of processes that could not be
        killed."""
        left = close_family(self._family, self._guard)
        for processes_of in self._starts.values():
            processes_of.wait()
        return left


class _GroupProcesses:
    """One start of a replica group on this node."""

    def __init__(self, job: Job, family: Family, group: int, number: int, passed: PassedThrough | None):
        self._job = job
        self.family = family
        self._group = group
        self._number = number
        self._passed = passed
        self._oom_kills = count_oom_kills()
        self._fault_watch = FaultWatch()
        self._torchrun = start(job.command, job, open_output=passed.open if passed else None)
        self._workers: list[psutil.Process] = []
        self._failed = self._orphaned = self._killed = self._exited = False
        self._exit_code: int | None = None
        """torchrun's exit code, if it exited by itself."""
        self._give_up_at_s = math.inf

    def poll(self) -> Iterator[ProcessMessage]:
        if self._exited:
            return
        code = self._torchrun.poll()
        if not self._killed:
            self._exit_code = code
            if not self._failed and (failure := self._find_failure(code)):
                self._failed = True
                yield failure
        if self._killed:
            left = self.family.kill_once()
        else:
            left = self.family.members() if code is not None else []
        given_up = time.monotonic() > self._give_up_at_s
        if given_up or (code is not None and not left):
            self._exited = True
            if self._passed:
                self._passed.finish()  # the group's log states why it ended
            pids = tuple(process.pid for process in left)
            faults = self._fault_watch.find() if self._exit_code else ()
            ended = GroupExited(self._group, self._number, self._exit_code, pids, faults=faults)
            kills = count_oom_kills() - self._oom_kills
            yield replace(ended, oom_kills=kills, memory_bytes=usable_memory_bytes()) if kills > 0 else ended
        elif left and not self._killed and not self._orphaned:
            self._orphaned = True
            yield WorkersOrphaned(self._group, self._number)

    def kill(self) -> None:
        """Kill the remaining processes repeatedly, until none are left or some have been stuck in the kernel for
        `KILL_TIMEOUT_S`."""
        if not self._killed:
            self._killed = True
            self._exit_code = self._torchrun.poll()
            self._give_up_at_s = time.monotonic() + processes.KILL_TIMEOUT_S
            self.family.kill_once()
            self._kill_torchrun()

    def _kill_torchrun(self) -> None:
        """Kill torchrun itself: a standby that still imports torch does not look like a member of the family yet."""
        if self._torchrun.poll() is None:
            self._torchrun.kill()

    def wait(self) -> None:
        self._kill_torchrun()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(processes.KILL_TIMEOUT_S)

    def _find_failure(self, code: int | None) -> WorkerExited | None:
        """Look for a failed worker of a group, because torchrun reports a failure only after waiting for the other
        workers. In a single-group run, let torchrun wait, so that all workers can write their reports. `code`:
        torchrun's exit code, if it has exited."""
        ranks = self._job.ranks or ()
        if code is None:
            if len(self._workers) < len(ranks):
                self._workers = []
                # If torchrun has exited in the meantime, the next poll sees that.
                with contextlib.suppress(psutil.NoSuchProcess):
                    children = psutil.Process(self._torchrun.pid).children()
                    self._workers = sorted(children, key=lambda process: process.pid)
            for rank, worker in zip(ranks, self._workers, strict=False):
                if own_code := processes.unread_exit_code(worker):
                    return self._failed_worker(rank, describe_exit(own_code), was_killed=own_code == -signal.SIGKILL)
            return None
        if not code:
            return None
        # torchrun exits with code 1 regardless of its workers' exit codes; its log lists them.
        if listed := find_listed(self._job):
            return self._failed_worker(listed[0].rank, listed[0].summary, was_killed=listed[0].was_killed)
        lost = f"lost its torchrun, which {describe_exit(code)}"
        return self._failed_worker((*ranks, 0)[0], lost, was_killed=code == -signal.SIGKILL)

    def _failed_worker(self, rank: int, summary: str, *, was_killed: bool) -> WorkerExited:
        return WorkerExited(self._group, self._number, rank, summary, was_killed)


def close_family(family: Family, guarding: subprocess.Popen[bytes]) -> tuple[int, ...]:
    """Kill whatever is left of a job on this node, then end its guard; return the ids of processes that could not be
    killed."""
    left = family.kill()
    family.close()
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guarding.communicate(guard.DONE, timeout=processes.KILL_TIMEOUT_S)
    return tuple(process.pid for process in left)
