"""The local backend: all of a run's processes are on this node."""

from __future__ import annotations

import shutil
import socket
import tempfile
from dataclasses import replace
from pathlib import Path

from trainspec_cli.core.environment_names import GENERATION, SECRET_FILE, SUPERVISOR
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.backend.hub import Hub
from trainspec_cli.run.backend.node_processes import NodeProcesses
from trainspec_cli.run.backend.observe import GroupStart, RendezvousWatch, RunningStart, poll_starts
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.generations import create_secret
from trainspec_cli.run.job.job import LOOPBACK, Job
from trainspec_cli.run.job.machine import BACKLOG
from trainspec_cli.run.recovery.run_state import Event, PresenceChanged
from trainspec_cli.run.rendezvous.address import Rendezvous

HERE = 0
"""This node's number."""
MOST_PATH_BYTES = 60
"""A longer name of the folder for temporary files leaves too little of the 104 bytes that the path of a Unix socket may
have on macOS (108 on Linux)."""


class LocalBackend:
    def __init__(self, job: Job, plan: Plan | None):
        # First of all: from now on an earlier start of this run, wherever it still lives, writes nothing more.
        self.generation = generations.begin(job.run)
        self._job = replace(job, environment={**job.environment, GENERATION: str(self.generation)})
        self._plan = plan
        self._groups = plan.replica_groups if plan else 1
        self._rendezvous: Rendezvous | None = None
        self._rendezvous_watch: RendezvousWatch | None = None
        self.hub: Hub | None = None
        self._private = Path()
        """A folder of this user alone, which holds the job's secret and the socket of the hub."""
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
        """Let the workers reach this process, by a socket that has no port. Replica groups meet at a rendezvous server;
        the processes of one group meet in a file."""
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
