"""Runs a job on several hosts: starts the agents, waits for all of them, and leaves none behind."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainspec_cli.launch.command import ENGINE
from trainspec_cli.launch.environment import FAILURE_GRACE_S, LAUNCH_ID, python_path
from trainspec_cli.launch.job import Job, next_log_folder
from trainspec_cli.launch.nodes.hub import Hub, Member
from trainspec_cli.launch.place import free_port
from trainspec_cli.launch.processes import POLL_S
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.spec.plan import Plan

JOIN_TIMEOUT_S = 300.0
"""Hosts may start this much later than the first (a slow prologue, an image to fetch)."""
END_TIMEOUT_S = 12.0
"""An agent that was told to end and has not after this long is given up: its host's own agent ends it when it no
longer hears the hub."""
DRAIN_S = 5.0
"""srun may take this long to end when all hosts have."""


@dataclass(frozen=True)
class Reach:
    """How the hosts of a job are reached."""

    head: str
    """The first host's name or address; this process runs there."""
    start: tuple[str, ...]
    """A command that runs an agent on every host (srun), or on this one alone; it gets RUN and GENERATION appended."""
    rendezvous_port: int | None = None
    """None: a free one."""


def reach_from_here(endpoint: str) -> Reach:
    """Where there is no Slurm: this host is the first, and every other starts its own agent. `endpoint`: HOST:PORT."""
    host, _, port = endpoint.rpartition(":")
    return Reach(host, agent_command(node=0), int(port))


def build_nodes_job(plan: Plan, root: Path, reach: Reach) -> Job:
    """On paper; `NodesExecutor` starts it."""
    root = root.absolute()
    return Job(
        root=root,
        command=reach.start,
        environment={LAUNCH_ID: secrets.token_hex(8), **python_path()},
        world_size=plan.world_size,
        stop_grace_s=plan.spec.run.stop_grace_s,
        logs=next_log_folder(RunDir(root).logs),
    )


@dataclass(frozen=True)
class Examination:
    """What every host goes through before its workers start."""

    command: tuple[str, ...]
    """Run on each host; prints its report as JSON in its last line."""
    judge: Callable[[Sequence[dict[str, Any]]], None]
    """Takes the reports of all hosts, by number. Raises MachineError where one is not fit."""


class NodesExecutor:
    def __init__(
        self, plan: Plan, reach: Reach, worker: Sequence[str] = ENGINE, examination: Examination | None = None
    ):
        self._plan, self._reach, self._worker, self._examination = plan, reach, worker, examination

    def submit(self, job: Job) -> Nodes:
        """Own the run, say where the hub is, start the agents."""
        job.logs.mkdir(parents=True, exist_ok=True)
        generation = generations.begin(job.run)
        hub = Hub(self._plan.num_nodes, job.launch_id, self._plan.spec.run.node_timeout_s, JOIN_TIMEOUT_S)
        generations.describe(
            job.run,
            generation,
            {
                "head": self._reach.head,
                "hub_port": hub.port,
                "rendezvous_port": self._reach.rendezvous_port or free_port(),
                "num_nodes": self._plan.num_nodes,
                "token": job.launch_id,
                "logs": str(job.logs),
                "worker": list(self._worker),
                "examine": list(self._examination.command) if self._examination else [],
                "host": socket.gethostname(),
            },
        )
        return Nodes(job, hub, _start(job, generation), self._examination, generation)


def _start(job: Job, generation: int) -> subprocess.Popen[bytes]:
    """In a session of its own: a terminal's Ctrl-C reaches the supervisor alone."""
    environment = {**os.environ, **job.environment}
    del environment[LAUNCH_ID]  # agents are not among those they end
    with job.torchrun_log.open("wb") as log:
        return subprocess.Popen(
            (*job.command, str(job.root), str(generation)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Nodes:
    def __init__(
        self,
        job: Job,
        hub: Hub,
        starter: subprocess.Popen[bytes],
        examination: Examination | None,
        generation: int,
    ):
        self._job, self._hub, self._starter = job, hub, starter
        self._examination, self.generation = examination, generation
        self._fence = Fence(job.run, generation)
        self._gone_at: float | None = None
        self._end_at: float | None = None

    def exit_code(self) -> int | None:
        """What the agents tell of torchrun; the starter's own where it ended before they came."""
        code = self._hub.exit_code
        if code is None and self._starter.poll() and not any(member.wire for member in self._hub.members):
            return self._starter.returncode
        return code

    def anything_left(self) -> bool:
        """Also hears the agents: it is asked about ten times a second.

        Raises MachineError for an unfit host, WorkerError where the run was begun anew elsewhere.
        """
        self._fence.check_now_and_then()
        self._hub.poll()
        self._judge()
        self._note_losses()
        if not self._hub.all_gone:
            return self._starter.poll() is None or any(member.wire and not member.gone for member in self._hub.members)
        self._gone_at = self._gone_at or time.monotonic()
        return self._starter.poll() is None and time.monotonic() < self._gone_at + DRAIN_S

    def ask_to_stop(self) -> None:
        self._hub.tell("stop")

    def end(self) -> tuple[int, ...]:
        """Have every agent end what it runs, then end the starter; what a lost host runs is fenced off."""
        self._hub.tell("end")
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and any(member.wire and not member.gone for member in self._hub.members):
            self._hub.poll()
            time.sleep(POLL_S)
        self._hub.close()
        # At SIGTERM srun has Slurm end the step by its number, and the step of a newer start has the same one.
        _end_process(self._starter, (signal.SIGKILL,) if self._fence.is_closed() else (signal.SIGTERM, signal.SIGKILL))
        return ()

    def _judge(self) -> None:
        """Once every host has been examined."""
        reports = [member.report for member in self._hub.members if member.report is not None]
        if self._examination and len(reports) == len(self._hub.members):
            write_json(self._job.root / "preflight.json", reports)
            self._examination.judge(reports)
            self._examination = None
            self._hub.tell("go")

    def _note_losses(self) -> None:
        """A job that lost a host cannot go on: the others are ended at once, without waiting for their timeouts."""
        for member in self._hub.members:
            words = member.loss or member.complaint
            if words and not self._fence.is_closed() and not self._job.run.node_error(member.node).exists():
                write_json(self._job.run.node_error(member.node), _last_words(member, words))
        self._end_others()

    def _end_others(self) -> None:
        """Once a host is lost nobody can go on; where one ended with a failure the others may say their last words."""
        lost = any(member.loss for member in self._hub.members)
        if self._end_at is None and (lost or any(member.exit_code for member in self._hub.members)):
            self._end_at = time.monotonic() + (0 if lost else FAILURE_GRACE_S)
        if self._end_at is not None and time.monotonic() >= self._end_at:
            self._end_at = math.inf
            self._hub.tell("end")


def _last_words(member: Member, words: str) -> dict[str, object]:
    return {
        "node": member.node,
        "host": member.host,
        "time": time.time(),
        "lost": bool(member.loss),
        "message": words,
    }


def _end_process(process: subprocess.Popen[bytes], numbers: Sequence[signal.Signals]) -> None:
    """One signal after the other, for what does not follow the first."""
    for number in numbers:
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            continue


def agent_command(node: int | None = None) -> tuple[str, ...]:
    """None: the number is that of the Slurm task."""
    number = () if node is None else ("--node", str(node))
    return (sys.executable, "-m", "trainspec_cli.launch.nodes.agent", *number)
