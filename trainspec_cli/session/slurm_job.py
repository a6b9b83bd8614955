"""`python -m trainspec_cli.session.slurm_job [--force] RUN COMMAND...`: the inside of a Slurm job, started by its batch
script.

Begins or resumes the run in RUN on the job's nodes (COMMAND is an srun of one agent each), and decides at the end
whether the job goes back to the queue. Its exit code is the run's own, and so the job's.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from trainspec_cli.errors import EXIT_DONE, Interrupted, MachineError, TrainspecError
from trainspec_cli.launcher.backend.nodes.backend import Reach
from trainspec_cli.launcher.job.folder import storage
from trainspec_cli.launcher.signals import PatientRequests, interrupt, on_stop_signal
from trainspec_cli.launcher.slurm import commands as slurm
from trainspec_cli.launcher.slurm.placing import HOSTFILE, arrange, has_switches
from trainspec_cli.launcher.slurm.queue import decide, is_over, is_preempted, note_job, own_job
from trainspec_cli.launcher.slurm.script import places_nodes
from trainspec_cli.printable import printing_safely
from trainspec_cli.reporter.problems import render_problems
from trainspec_cli.reporter.style import Style
from trainspec_cli.rundir.files import write_text
from trainspec_cli.rundir.generations import FENCED
from trainspec_cli.rundir.paths import RunDir
from trainspec_cli.rundir.record import read_plan
from trainspec_cli.session.console import PrintableConsole, RunConsole
from trainspec_cli.session.resume import prepare_unchanged
from trainspec_cli.session.session import start
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.trust import check_tree

FORCE = "--force"
"""Train although the plan is predicted not to fit the nodes."""
AVOID_S = 5.0
"""Slurm leaves a job that it has requeued some seconds to end (KillWait, 30 by default)."""


def main() -> None:
    with printing_safely():
        _main()


def _main() -> None:
    force = sys.argv[1] == FORCE
    name, *command = sys.argv[1 + force :]
    run, job_id, warning = RunDir(name), own_job(), TimeWarning()
    console = RunConsole(width=120, highlight=False)
    try:
        with on_stop_signal(interrupt):
            check_tree(run.root)
            with storage(str(run.root)):
                note_job(run, job_id)
            place_nodes(run, read_plan(run), console)
            reach = Reach(slurm.own_address(), tuple(command))
            code = start(prepare_unchanged(run, reach, console, force=force), PatientRequests())
    except KeyboardInterrupt:
        print("interrupted before the workers were started", file=sys.stderr)
        code = Interrupted.exit_code
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


def place_nodes(run: RunDir, plan: Plan, console: PrintableConsole) -> None:
    """Number the job's nodes by their switches, where the plan depends on that. Raises MachineError."""
    if plan.blueprint is None or not places_nodes(plan):
        return
    addresses = slurm.topology_addresses(plan.num_nodes)
    if not has_switches(addresses):
        console.print("nodes are placed in Slurm's own order: it knows no switches above them (topology/tree)")
    hosts = arrange(addresses, slurm.own_name(), plan.blueprint.node_places)
    with storage(str(run.root)):
        write_text(run.hosts_txt, "\n".join(hosts) + "\n")
    os.environ[HOSTFILE] = str(run.hosts_txt.absolute())


class TimeWarning:
    """SIGUSR2, which Slurm sends ahead of the time limit; for the supervisor it is a request to stop."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True
        signal.raise_signal(signal.SIGTERM)


def _end_badly(run: RunDir, job_id: str, code: int, *, warned: bool, console: PrintableConsole) -> None:
    """Send the job back to the queue if that is of use, unless that was done often enough. Raises MachineError."""
    options, done = read_plan(run).spec.cluster.slurm, int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = slurm.show(job_id)
    again = decide(run, code, warned=warned, preempted=is_preempted(job))
    if again is None or is_over(job, done):
        return
    if done >= options.max_requeues:
        often = f"the job was requeued {done} times (cluster.slurm.max_requeues)"
        console.print(f"not requeued: {again.reason}, and {often}")
        return
    console.print(f"requeued: {again.reason}; start {done + 2} goes on from the newest checkpoint")
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    slurm.requeue(job_id)
    if again.avoid:
        _avoid(job_id, again.avoid, options.exclude)


def _avoid(job_id: str, hostnames: Sequence[str], always: str | None) -> None:
    """Keep the job off `hostnames`: only a pending job takes that, so it is done in the grace time before the end."""
    deadline = time.monotonic() + AVOID_S
    while True:
        try:
            return slurm.exclude(job_id, hostnames, always)
        except MachineError as error:
            if time.monotonic() > deadline:
                print(f"{error}; the job may be started on {', '.join(hostnames)} again", file=sys.stderr)
                return None
        time.sleep(0.2)


if __name__ == "__main__":
    main()
