"""`python -m trainspec_cli.session.slurm_job [--force] RUN COMMAND...`: the inside of a Slurm job, started by its batch
script.

Begins or resumes the run in RUN on the job's nodes (COMMAND is an srun of one agent each), and decides at the end
whether the job goes back to the queue. Its exit code is the run's own, and so the job's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainspec_cli.core.errors import EXIT_DONE, Interrupted, TrainspecError
from trainspec_cli.core.printable import printing_safely
from trainspec_cli.core.trust import check_tree
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.report.problems import render_problems
from trainspec_cli.report.style import Style
from trainspec_cli.run.backend.nodes.backend import Reach
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.run.folder.generations import FENCED
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import has_own_command, read_plan
from trainspec_cli.run.job.folder import storage
from trainspec_cli.run.signals import PatientRequests, interrupt, on_stop_signal
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.placing import HOSTFILE, arrange, has_switches
from trainspec_cli.run.slurm.queue import note_job, own_job
from trainspec_cli.run.slurm.script import places_nodes
from trainspec_cli.session.console import PrintableConsole, RunConsole
from trainspec_cli.session.launching.requeue import TimeWarning, limits_of, requeue_if_of_use
from trainspec_cli.session.launching.resume import prepare_unchanged
from trainspec_cli.session.launching.session import start
from trainspec_cli.wings.own_script.launching import run_in_job

FORCE = "--force"
"""Train although the plan is predicted not to fit the nodes."""


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
            code = _start(run, command, console, force=force)
    except KeyboardInterrupt:
        print("interrupted before the workers were started", file=sys.stderr)
        code = Interrupted.exit_code
    except TrainspecError as error:
        print(render_problems(error.problems, Style.of(sys.stderr), "error"), file=sys.stderr)
        if error.problems[0].code == FENCED:
            sys.exit(error.exit_code)
        code = error.exit_code
    if code != EXIT_DONE:
        requeue_if_of_use(run, job_id, code, limits_of(run), warned=warning.came, console=console)
    sys.exit(code)


def _start(run: RunDir, command: Sequence[str], console: RunConsole, *, force: bool) -> int:
    """Return the run's exit code. Raises TrainspecError where the run is refused, or fails."""
    if has_own_command(run):
        reach = Reach(slurm.own_address(), tuple(command))
        return run_in_job(run, reach, console, PatientRequests())
    place_nodes(run, read_plan(run), console)
    reach = Reach(slurm.own_address(), tuple(command))
    return start(prepare_unchanged(run, reach, console, force=force), PatientRequests())


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


if __name__ == "__main__":
    main()
