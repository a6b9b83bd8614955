"""`python -m trainspec_cli.session.slurm_job [--force] RUN COMMAND...`: the code that runs inside a Slurm job, started
by its batch script.

Starts or resumes the run in RUN on the job's nodes (COMMAND is an srun with one agent per node), and decides at the end
whether to requeue the job. Its exit code is the run's, and therefore the job's. In a job that replaces a lost node, it
only starts the node's agent (`run/slurm/replacement.py`).

A child process does this. If the child is killed (`kill -9`, out of memory), another one continues the run on the same
nodes: Slurm does not requeue a job whose batch script was killed.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from functools import partial
from types import FrameType

from trainspec_cli.core.environment_names import JOINS
from trainspec_cli.core.errors import EXIT_DONE, Interrupted, TrainspecError
from trainspec_cli.core.node import check_tree
from trainspec_cli.core.printable import Style, printing_safely
from trainspec_cli.core.wings import MISSING_WING
from trainspec_cli.reporter.console import RunConsole
from trainspec_cli.reporter.problems import render_problems
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder.events import spoken_bytes
from trainspec_cli.run.folder.generations import FENCED
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.job.folder import storage
from trainspec_cli.run.signals import PatientRequests, interrupt, on_stop_signal
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.queue import note_job, own_job
from trainspec_cli.run.slurm.replacement import ReplacementJobs, join_in_place
from trainspec_cli.session.launching.in_slurm import TimeWarning, requeue_if_of_use
from trainspec_cli.session.launching.kinds import kind_of

FORCE = "--force"
"""Option to train even if the plan is predicted not to fit on the nodes."""


FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""Slurm sends some of these only to the batch script. The child may get them twice, which makes no difference."""


def run_in_child() -> None:
    run = RunDir(sys.argv[1 + (sys.argv[1] == FORCE)])
    before = {number: signal.getsignal(number) for number in FORWARDED}
    while True:
        spoken = spoken_bytes(run)
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # a signal in between would end this process
        child = os.fork()
        for number, handler in before.items():
            signal.signal(number, partial(_forward, child) if child else handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        if not child:
            main()
            return
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        # Without an event from the workers, the next child would most likely be killed, too.
        if code != -signal.SIGKILL or spoken_bytes(run) == spoken:
            sys.exit(code if code >= 0 else 128 - code)
        print("the supervisor was killed by SIGKILL; another one continues the run", file=sys.stderr, flush=True)


def _forward(child: int, number: int, _: FrameType | None) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, number)


def main() -> None:
    with printing_safely():
        _main()


def _main() -> None:
    force = sys.argv[1] == FORCE
    name, *command = sys.argv[1 + force :]
    run = RunDir(name)
    if joins := os.environ.get(JOINS):
        join_in_place(joins, run, command)
    job_id = own_job()
    warning = TimeWarning()
    console = RunConsole(width=120, highlight=False)
    try:
        with on_stop_signal(interrupt):
            check_tree(run.root)
            with storage(str(run.root)):
                note_job(run, job_id)
            limits = kind_of(run).limits(run)
            replacements = ReplacementJobs(run, job_id, limits.max_requeues, limits.exclude)
            reach = Reach(slurm.own_address(), tuple(command), replacements=replacements)
            code = kind_of(run).run_in_job(run, reach, console, PatientRequests(), force=force)
    except KeyboardInterrupt:
        print("interrupted before the workers were started", file=sys.stderr)
        code = Interrupted.exit_code
    except TrainspecError as error:
        print(render_problems(error.problems, Style.of(sys.stderr), "error"), file=sys.stderr)
        if error.problems[0].code in (FENCED, MISSING_WING):  # another start has taken over, or the plug-in is missing
            sys.exit(error.exit_code)
        code = error.exit_code
    if code != EXIT_DONE:
        requeue_if_of_use(run, job_id, code, kind_of(run).limits(run), warned=warning.came, console=console)
    sys.exit(code)


if __name__ == "__main__":
    run_in_child()
