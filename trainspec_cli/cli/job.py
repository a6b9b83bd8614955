"""`python -m trainspec_cli.cli.job RUN COMMAND...`: the inside of a Slurm job, started by its batch script.

Begins or resumes the run in RUN on the job's hosts (COMMAND is an srun of one agent each), and decides at the end
whether the job goes back to the queue. Its exit code is the run's own, and so the job's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from types import FrameType

from rich.console import Console

from trainspec_cli.cli.nodes import drive
from trainspec_cli.cli.problems import render_problems
from trainspec_cli.cli.resume import read_plan
from trainspec_cli.cli.style import Style
from trainspec_cli.errors import TrainspecError
from trainspec_cli.launch.nodes.executor import Reach
from trainspec_cli.launch.signals import PatientRequests
from trainspec_cli.launch.slurm import commands as slurm
from trainspec_cli.launch.slurm.requeue import Requeue, decide
from trainspec_cli.rundir.paths import RunDir

REQUEUED_S = 120.0
"""Slurm ends a job that it has requeued; it takes no longer than this."""


def main() -> None:
    run, start = RunDir(sys.argv[1]), tuple(sys.argv[2:])
    job_id, warning = os.environ["SLURM_JOB_ID"], TimeWarning()
    console = Console(width=120, highlight=False)
    try:
        host = os.environ.get("SLURMD_NODENAME") or slurm.first_host(os.environ["SLURM_JOB_NODELIST"])
        reach = Reach(slurm.address_of(host), start)
        code = drive(run, reach, console, requests=PatientRequests())
    except TrainspecError as error:
        print(render_problems(error.problems, Style.of(sys.stderr), "error"), file=sys.stderr)
        code = error.exit_code
    again = decide(run, code, warned=warning.came)
    if again:
        _requeue(run, job_id, again, console)
    sys.exit(code)


class TimeWarning:
    """SIGUSR2, which Slurm sends ahead of the time limit; for the supervisor it is a request to stop."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.raise_signal(signal.SIGTERM)


def _requeue(run: RunDir, job_id: str, again: Requeue, console: Console) -> None:
    """Returns where the job has been requeued often enough."""
    done, most = int(os.environ.get("SLURM_RESTART_COUNT", "0")), read_plan(run).spec.cluster.slurm.max_requeues
    if done >= most:
        console.print(
            f"not requeued: {again.reason}, and the job was requeued {done} times (cluster.slurm.max_requeues)"
        )
        return
    if again.avoid:
        slurm.exclude(job_id, again.avoid, before=slurm.excluded(job_id))
    console.print(f"requeued: {again.reason}; start {done + 2} goes on from the newest checkpoint")
    sys.stdout.flush()
    slurm.requeue(job_id)
    time.sleep(REQUEUED_S)


if __name__ == "__main__":
    main()
