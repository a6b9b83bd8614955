"""Runs a job on this host."""

from __future__ import annotations

import contextlib
import math
import subprocess
import time
from dataclasses import replace

from trainspec_cli.launch.backend import guard, processes
from trainspec_cli.launch.backend.executor import Presence
from trainspec_cli.launch.backend.family import Family
from trainspec_cli.launch.backend.part import Part, devices_of, ranks_of, start_folder
from trainspec_cli.launch.backend.spawn import start, start_guard
from trainspec_cli.launch.job.command import LOOPBACK, torchrun_command
from trainspec_cli.launch.job.environment import FAILURE_GRACE_S, group_environment
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.secret import create_secret
from trainspec_cli.rundir.stops import note_stop
from trainspec_cli.spec.results.plan import Plan


class LocalExecutor:
    def submit(self, job: Job) -> LocalProcesses:
        """Start torchrun in a session of its own, so that Ctrl-C reaches the supervisor alone."""
        job = own_run(job)
        job.logs.mkdir(parents=True, exist_ok=True)
        return LocalProcesses(job)

    def submit_groups(self, job: Job, plan: Plan) -> LocalGroups:
        return LocalGroups(own_run(job), plan)


class LocalProcesses:
    def __init__(self, job: Job):
        self._job = job
        self._guard, self._family = start_guard(job), Family(job)
        self._torchrun = start(job.command, job)
        self._orphans_end_at = math.inf

    @property
    def generation(self) -> int:
        return generation_of(self._job)

    def exit_code(self) -> int | None:
        return self._torchrun.poll()

    def anything_left(self) -> bool:
        """Workers that a killed torchrun has left may write a checkpoint within `FAILURE_GRACE_S`: they are asked to
        end, which is no request to stop the run."""
        if self.exit_code() is None:
            return True
        if not self._family.members():
            return False
        if self._orphans_end_at == math.inf:
            self._orphans_end_at = time.monotonic() + FAILURE_GRACE_S
            self._family.ask_to_stop()
        elif time.monotonic() > self._orphans_end_at:
            self._family.kill_once()
        return True

    def ask_to_stop(self) -> None:
        note_stop(self._job.run, self.generation)
        self._family.ask_to_stop()

    def end(self) -> tuple[int, ...]:
        left = end_launch(self._family, self._guard)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._torchrun.wait(processes.KILL_TIMEOUT_S)
        return left


class LocalGroups:
    """Replica groups of this host, each with a torchrun of its own."""

    def __init__(self, job: Job, plan: Plan):
        self._job, self._plan = job, plan
        self._guard, self._family = start_guard(job), Family(job)
        secret_file = job.run.secret(self.generation)
        create_secret(secret_file)
        self.rendezvous = Rendezvous(job, plan.spec.resilience, secret_file, LOOPBACK)

    @property
    def generation(self) -> int:
        return generation_of(self._job)

    def poll(self) -> tuple[str, ...]:
        return ()

    def presence(self, group: int) -> Presence:
        return "there"

    def start(self, group: int, number: int) -> Part:
        logs, size = self._job.logs / start_folder(group, number), self._plan.group_size
        own = group_environment(group, number) | self.rendezvous.environment | devices_of(self._plan, group)
        job = replace(
            self._job,
            command=torchrun_command(size, logs, self._job.worker),
            environment={**self._job.environment, **own},
            world_size=size,
            logs=logs,
            ranks=ranks_of(self._plan, group),
        )
        return Part(job, group)

    def ask_to_stop(self) -> None:
        note_stop(self._job.run, self.generation)
        self._family.ask_to_stop()

    def note_losses(self) -> None:
        """This host cannot be lost by itself."""

    def end(self) -> tuple[int, ...]:
        left = end_launch(self._family, self._guard)
        self.rendezvous.close()
        return left


def end_launch(family: Family, guarding: subprocess.Popen[bytes]) -> tuple[int, ...]:
    """Kill what is left on this host, then send the guard home; -> the ids of what could not be killed."""
    left = family.kill()
    family.close()
    with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
        guarding.communicate(guard.DONE, timeout=processes.KILL_TIMEOUT_S)
    return tuple(process.pid for process in left)


def generation_of(job: Job) -> int:
    """Of a job that is being started: the number of its start among all of the run's."""
    return int(job.environment[generations.GENERATION])


def own_run(job: Job) -> Job:
    """The run belongs to this start from now on, unless the job is a part of one that owns it."""
    if generations.GENERATION in job.environment:
        return job
    return replace(job, environment={**job.environment, generations.GENERATION: str(generations.begin(job.run))})
