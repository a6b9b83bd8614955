"""The agents of one start, as the first host sees them: heard, examined, and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainspec_cli.errors import MachineError
from trainspec_cli.launch.backend.nodes.hub import Hub, Member
from trainspec_cli.launch.backend.processes import POLL_S
from trainspec_cli.launch.job.environment import LAUNCH_ID
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.rundir.files import write_json
from trainspec_cli.rundir.generations import Fence
from trainspec_cli.spec.results.doctor import NodeReport

END_TIMEOUT_S = 12.0
"""An agent that was told to end and has not after this long is given up: its host's own agent ends it when it no
longer hears the hub."""
DRAIN_S = 5.0
"""srun may take this long to end when all hosts have."""


@dataclass(frozen=True)
class Examination:
    """What every host goes through before its workers start."""

    command: tuple[str, ...]
    """Run on each host; prints its report as JSON in its last line."""
    judge: Callable[[Sequence[NodeReport]], None]
    """Takes the reports of all hosts, by number. Raises MachineError where one is not fit."""


class Agents:
    def __init__(self, job: Job, hub: Hub, rendezvous: Rendezvous, examination: Examination | None, generation: int):
        """Starts them."""
        self.hub, self.rendezvous, self.generation = hub, rendezvous, generation
        self._job, self._examination = job, examination
        self._fence = Fence(job.run, generation)
        self._starter = _start(job, generation)

    @property
    def starting(self) -> bool:
        """Whether what starts agents lives; srun does for as long as they do."""
        return self._starter.poll() is None

    @property
    def failed_to_start(self) -> int | None:
        """The exit code of what starts agents, where it ended before any came."""
        return None if any(member.wire for member in self.hub.members) else self._starter.poll() or None

    def poll(self) -> list[str]:
        """Hear them; -> why hosts that came back are refused.

        Raises MachineError for a host that is unfit from the beginning, WorkerError where the run was begun anew
        elsewhere.
        """
        self._fence.check_now_and_then()
        self.hub.poll()
        return self._admit()

    def note_losses(self) -> None:
        """Hosts that are lost, or lack something, go down in the run folder."""
        for member in self.hub.members:
            words = member.loss or member.complaint
            if words and not self._fence.is_closed() and not self._job.run.node_error(member.node).exists():
                write_json(self._job.run.node_error(member.node), _last_words(member, words))

    def end(self) -> None:
        """Have every agent end what it runs, then end the starter; what a lost host runs is fenced off."""
        self.hub.tell("end")
        deadline = time.monotonic() + END_TIMEOUT_S
        while time.monotonic() < deadline and any(member.wire and not member.gone for member in self.hub.members):
            self.hub.poll()
            time.sleep(POLL_S)
        self.hub.close()
        self.rendezvous.close()
        # At SIGTERM srun has Slurm end the step by its number, and the step of a newer start has the same one.
        _end_process(self._starter, (signal.SIGKILL,) if self._fence.is_closed() else (signal.SIGTERM, signal.SIGKILL))

    def _admit(self) -> list[str]:
        """Let workers start, once every host that is awaited has been examined; later, on one that came back."""
        here = [member for member in self.hub.members if not member.gone and not member.complaint]
        new = [member for member in here if member.wire and not member.admitted]
        if self._examination and any(member.report is None for member in here):
            return []
        if new and self._examination:
            reports = [member.report for member in here if member.report is not None]
            write_json(self._job.root / "preflight.json", [report.as_json() for report in reports])
            try:
                self._examination.judge(reports)
            except MachineError as error:
                if len(new) == len(here):
                    raise
                return [_refuse(member, error) for member in new]
        for member in new:
            member.admitted = True
            member.say("go")
        return []


def _refuse(member: Member, error: MachineError) -> str:
    member.complaint = str(error)
    member.say("end")
    return f"{member.name} came back and stays away: {error}"


def _start(job: Job, generation: int) -> subprocess.Popen[bytes]:
    """In a session of its own: a terminal's Ctrl-C reaches the supervisor alone."""
    environment = {**os.environ, **job.environment}
    del environment[LAUNCH_ID]  # agents are not among those they end
    with job.torchrun_log.open("ab") as log:
        return subprocess.Popen(
            (*job.command, str(job.root), str(generation)),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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
