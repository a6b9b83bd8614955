"""Requeue a Slurm job when its run has ended. The rules are the same for all kinds of runs."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import FrameType

from trainspec_cli.core.errors import MachineError
from trainspec_cli.recipe.keys.cluster import SlurmSpec
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.queue import decide, is_over, is_preempted

AVOID_S = 5.0
"""Maximum time for requeuing the job, in seconds. It is short because Slurm gives a requeued job little time to end
(KillWait, 30 s by default)."""


@dataclass(frozen=True)
class Limits:
    """Limits on requeuing a job."""

    num_nodes: int
    max_requeues: int = SlurmSpec.max_requeues
    exclude: str | None = None
    """Nodes excluded by the user."""
    after_hang: bool = True
    """Whether to requeue after a hang. False if the run has already been restarted within the job as often as
    allowed."""


class TimeWarning:
    """Handles SIGUSR2, which Slurm sends before the time limit, by asking the supervisor to stop."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.raise_signal(signal.SIGTERM)


def requeue_if_of_use(
    run: RunDir, job_id: str, code: int, limits: Limits, *, warned: bool, console: PrintableConsole
) -> None:
    """Requeue the job if that would help and the limit allows it. If Slurm rejects the requeue, print the reason."""
    done = restarts()
    try:
        job = slurm.show(job_id)
        about = {"warned": warned, "preempted": is_preempted(job), "after_hang": limits.after_hang}
        again = decide(run, code, num_nodes=limits.num_nodes, **about)
        if again is None or is_over(job, done) or job.get("BatchFlag") == "0":  # an interactive job cannot be requeued
            return
        if job.get("Requeue", "1") == "0":
            console.print(f"not requeued: {again.reason}, and the job was submitted without --requeue")
            return
        if done >= limits.max_requeues:
            often = f"the job was requeued {done} times (cluster.slurm.max_requeues)"
            console.print(f"not requeued: {again.reason}, and {often}")
            return
        console.print(f"requeued: {again.reason}; start {done + 2} continues from the newest checkpoint")
        sys.stdout.flush()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        slurm.requeue(job_id)
        if again.avoid:
            _avoid(job_id, again.avoid, limits.exclude)
    except MachineError as error:
        print(f"not requeued: {error}", file=sys.stderr)


def restarts() -> int:
    """Return how many times Slurm has restarted this job."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _avoid(job_id: str, hostnames: Sequence[str], always: str | None) -> None:
    """Exclude `hostnames` from the job. Slurm only accepts this once the job is pending again, so retry for a while."""
    deadline = time.monotonic() + AVOID_S
    while True:
        try:
            return slurm.exclude(job_id, hostnames, always)
        except MachineError as error:
            if time.monotonic() > deadline:
                print(f"{error}; the job may be started on {', '.join(hostnames)} again", file=sys.stderr)
                return None
        time.sleep(0.2)
