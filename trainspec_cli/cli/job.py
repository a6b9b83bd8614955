"""`python -m trainspec_cli.cli.job RUN COMMAND...`: the inside of a Slurm job, started by its batch script.

Begins or resumes the run in RUN on the job's hosts (COMMAND is an srun of one agent each), and decides at the end
whether the job goes back to the queue. Its exit code is the run's own, and so the job's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from rich.console import Console

from trainspec_cli.cli.console import PrintableConsole
from trainspec_cli.cli.nodes import drive
from trainspec_cli.cli.problems import render_problems
from trainspec_cli.cli.style import Style
from trainspec_cli.errors import EXIT_DONE, MachineError, TrainspecError
from trainspec_cli.launch.backend.nodes.backend import Reach
from trainspec_cli.launch.job.folder import storage
from trainspec_cli.launch.signals import PatientRequests
from trainspec_cli.launch.slurm import commands as slurm
from trainspec_cli.launch.slurm.queue import note_job, own_job
from trainspec_cli.launch.slurm.requeue import decide, is_over, is_preempted
from trainspec_cli.printable import printing_safely
from trainspec_cli.rundir.generations import FENCED
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_plan
from trainspec_cli.trust import check_tree

AVOID_S = 5.0
"""Slurm leaves a job that it has requeued some seconds to end (KillWait, 30 by default)."""


def main() -> None:
    with printing_safely():
        _main()


def _main() -> None:
    run, start = RunDir(sys.argv[1]), tuple(sys.argv[2:])
    job_id, warning = own_job(), TimeWarning()
    console = PrintableConsole(width=120, highlight=False)
    try:
        check_tree(run.root)
        with storage(str(run.root)):
            note_job(run, job_id)
        reach = Reach(slurm.own_address(), start)
        code = drive(run, reach, console, requests=PatientRequests())
    except TrainspecError as error:
        print(render_problems(error.problems, Style.of(sys.stderr), "error"), file=sys.stderr)
        if error.problems[0].code == FENCED:
            sys.exit(error.exit_code)
        code = error.exit_code
    if code != EXIT_DONE:
        try:
            _end_badly(run, job_id, code, warned=warning.came, console=console)
        except MachineError as error:
            print(f"not requeued: {error}", file=sys.stderr)
    sys.exit(code)


class TimeWarning:
    """SIGUSR2, which Slurm sends ahead of the time limit; for the supervisor it is a request to stop."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.raise_signal(signal.SIGTERM)


def _end_badly(run: RunDir, job_id: str, code: int, *, warned: bool, console: Console) -> None:
    """Back to the queue, if that is of use, unless the job has been requeued often enough. Raises MachineError."""
    options, done = read_plan(run).spec.cluster.slurm, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = slurm.show(job_id)
    again = decide(run, code, warned=warned, preempted=is_preempted(job))
    if again is None or is_over(job, done):
        return
    if done >= options.max_requeues:
        console.print(
            f"not requeued: {again.reason}, and the job was requeued {done} times (cluster.slurm.max_requeues)"
        )
        return
    console.print(f"requeued: {again.reason}; start {done + 2} goes on from the newest checkpoint")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    slurm.requeue(job_id)
    if again.avoid:
        _avoid(job_id, again.avoid, options.exclude)


def _avoid(job_id: str, hosts: Sequence[str], always: str | None) -> None:
    """Only a job that waits can be told to stay away from a host, so this is done in the grace time before the end."""
    deadline = time.monotonic() + AVOID_S
    while True:
        try:
            return slurm.exclude(job_id, hosts, always)
        except MachineError as error:
            if time.monotonic() > deadline:
                print(f"{error}; the job may be started on {', '.join(hosts)} again", file=sys.stderr)
                return None
        time.sleep(0.2)


if __name__ == "__main__":
    main()
