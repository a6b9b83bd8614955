"""Runs a job on several hosts: starts the agents, waits for all of them, and leaves none behind."""

from __future__ import annotations

import math
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainspec_cli.launch.backend.nodes.agents import DRAIN_S, Agents, Examination
from trainspec_cli.launch.backend.nodes.groups import NodesGroups
from trainspec_cli.launch.backend.nodes.hub import Hub, max_knocks
from trainspec_cli.launch.job.command import ENGINE
from trainspec_cli.launch.job.environment import FAILURE_GRACE_S, LAUNCH_ID, own_modules
from trainspec_cli.launch.job.job import Job, next_log_folder
from trainspec_cli.launch.job.place import allow_connections, listen, listening_address
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.secret import create_secret
from trainspec_cli.spec.results.plan import Plan

JOIN_TIMEOUT_S = 300.0
"""Hosts may start this much later than the first (a slow prologue, an image to fetch)."""


@dataclass(frozen=True)
class Reach:
    """How the hosts of a job are reached."""

    head: str
    """The first host's name or address; this process runs there."""
    start: tuple[str, ...]
    """A command that runs an agent on every host (srun), or on this one alone; it gets RUN and GENERATION appended."""
    rendezvous_port: int | None = None
    """None: a free one."""
    return_timeout_s: float = 0.0
    """A lost host's agent may be started again: where the others are too few without it, they wait this long."""


def reach_from_here(endpoint: str) -> Reach:
    """Where there is no Slurm: this host is the first, and every other starts its own agent. `endpoint`: HOST:PORT."""
    host, _, port = endpoint.rpartition(":")
    return Reach(host, agent_command(node=0), int(port), return_timeout_s=JOIN_TIMEOUT_S)


def build_nodes_job(plan: Plan, root: Path, reach: Reach) -> Job:
    """On paper; `NodesExecutor` starts it."""
    root = root.absolute()
    return Job(
        root=root,
        command=reach.start,
        environment={LAUNCH_ID: secrets.token_hex(8), **own_modules()},
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=next_log_folder(RunDir(root).logs),
    )


class NodesExecutor:
    def __init__(
        self, plan: Plan, reach: Reach, worker: Sequence[str] = ENGINE, examination: Examination | None = None
    ):
        self._plan, self._reach, self._worker, self._examination = plan, reach, worker, examination

    def submit(self, job: Job) -> Nodes:
        return Nodes(self._call_agents(job))

    def submit_groups(self, job: Job, plan: Plan) -> NodesGroups:
        agents = self._call_agents(job, welcomes_back=True)
        return NodesGroups(agents, job, plan, self._reach.return_timeout_s)

    def _call_agents(self, job: Job, *, welcomes_back: bool = False) -> Agents:
        """Own the run, say where the hub is, start the agents."""
        job.logs.mkdir(parents=True, exist_ok=True)
        generation = generations.begin(job.run)
        allow_connections(max_knocks(self._plan.num_nodes) + self._plan.num_nodes)
        secret_file = job.run.secret(generation)
        secret = create_secret(secret_file)
        head, spec = self._reach.head, self._plan.spec
        address = listening_address(head)
        hub = Hub(
            self._plan.num_nodes,
            secret,
            listen(address),
            spec.run.node_timeout_s,
            JOIN_TIMEOUT_S,
            welcomes_back=welcomes_back,
        )
        port = self._reach.rendezvous_port or 0
        rendezvous = Rendezvous(job, spec.resilience, secret_file, address, port, name=head)
        generations.describe(
            job.run,
            generation,
            {
                "head": head,
                "hub_port": hub.port,
                "rendezvous": rendezvous.environment,
                "num_nodes": self._plan.num_nodes,
                "launch_id": job.launch_id,
                "logs": str(job.logs),
                "worker": list(self._worker),
                "examine": list(self._examination.command) if self._examination else [],
                "host": socket.gethostname(),
            },
        )
        return Agents(job, hub, rendezvous, self._examination, generation)


class Nodes:
    """One torchrun over all hosts: it cannot do without any of them."""

    def __init__(self, agents: Agents):
        self._agents, self._hub = agents, agents.hub
        self._gone_at: float | None = None
        self._end_at: float | None = None

    @property
    def generation(self) -> int:
        return self._agents.generation

    def exit_code(self) -> int | None:
        """What the agents tell of torchrun; the starter's own where it ended before they came."""
        code = self._hub.exit_code
        return self._agents.failed_to_start if code is None else code

    def anything_left(self) -> bool:
        """Also hears the agents: it is asked about ten times a second.

        Raises MachineError for an unfit host, WorkerError where the run was begun anew elsewhere.
        """
        self._agents.poll()
        self._agents.rendezvous.keep_alive()
        self._agents.note_losses()
        self._end_others()
        if not self._hub.all_gone:
            return self._agents.starting or any(member.wire and not member.gone for member in self._hub.members)
        self._gone_at = self._gone_at or time.monotonic()
        return self._agents.starting and time.monotonic() < self._gone_at + DRAIN_S

    def ask_to_stop(self) -> None:
        self._hub.tell("stop")

    def end(self) -> tuple[int, ...]:
        self._agents.end()
        return ()

    def _end_others(self) -> None:
        """Once a host is lost nobody can go on; where one ended with a failure the others may say their last words."""
        lost = any(member.loss for member in self._hub.members)
        if self._end_at is None and (lost or any(member.exit_code for member in self._hub.members)):
            self._end_at = time.monotonic() + (0 if lost else FAILURE_GRACE_S)
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self._end_at = math.inf
            self._hub.tell("end")


def agent_command(node: int | None = None) -> tuple[str, ...]:
    """None: the number is that of the Slurm task."""
    number = () if node is None else ("--node", str(node))
    return (sys.executable, "-m", "trainspec_cli.launch.backend.nodes.agent", *number)
