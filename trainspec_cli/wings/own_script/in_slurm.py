"""`trainspec run` in a Slurm job whose script is the user's own: its nodes, its folder, and the way back to the queue.

srun starts it once on each node. Where Slurm starts the job again, the run goes on in its folder.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Literal

from trainspec_cli.core.errors import EXIT_DONE, Interrupted, Problem, RecipeError, TrainspecError
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.run.backend.nodes.backend import Reach, agent_command
from trainspec_cli.run.folder.generations import FENCED
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.run.folder.record import read_result, read_run_record
from trainspec_cli.run.job.folder import RUNS
from trainspec_cli.run.signals import PatientRequests, StopRequests
from trainspec_cli.run.slurm import commands as slurm
from trainspec_cli.run.slurm.commands import idle_nodes, read_step
from trainspec_cli.run.slurm.queue import job_of, note_job, own_job
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.launching.in_slurm import Limits, TimeWarning, requeue_if_of_use, restarts
from trainspec_cli.session.launching.nodes import NodeOptions
from trainspec_cli.wings.own_script.job import script_name

JOB = "SLURM_JOB_ID"


def find_place(command: Sequence[str], folder: str | None, nodes: NodeOptions) -> tuple[NodeOptions, str]:
    """Return the nodes of the run and its folder: as they were typed; else those of srun's step, and a folder below
    ./runs that has its number, which all of its nodes know, and its next start. Raises RecipeError where srun has
    started several tasks on a node."""
    if nodes != NodeOptions():
        return nodes, folder or AUTO
    step = read_step(os.environ)
    if step is None:
        return nodes, folder or AUTO
    usual = RUNS / script_name(command) / f"slurm-{step.job_id}.{step.number}"
    several = NodeOptions(step.num_nodes, step.node, of_slurm=True) if step.num_nodes > 1 else nodes
    return several, folder or str(usual)


def reach_nodes(nodes: NodeOptions, run_dir: str, join_timeout_s: float) -> Reach | None:
    """Return how the nodes of a command reach one another; None where it has this node alone. Raises RecipeError where
    the command line does not say it."""
    example = "--nnodes 2 --node-rank I --rdzv-endpoint HOST:PORT --dir <a shared folder> -- COMMAND"
    hint = f"on each node: trainspec run {example}"
    if nodes.of_slurm:
        return Reach(slurm.own_address() if nodes.is_first else "", agent_command(0), None, join_timeout_s)
    if nodes.nnodes is None or nodes.nnodes == 1:
        if nodes.endpoint is not None or nodes.node_rank:
            option = "--node-rank" if nodes.node_rank else "--rdzv-endpoint"
            message = f"{option} is of several nodes, and --nnodes is {nodes.nnodes or 'not given'}"
            raise RecipeError(Problem("usage", message, option, hint))
        return None
    if nodes.nnodes < 1:
        raise RecipeError(Problem("usage", f"--nnodes is {nodes.nnodes}; it is 1 or more", "--nnodes", hint))
    if nodes.endpoint is None:
        message = f"--nnodes is {nodes.nnodes}, and --rdzv-endpoint, where the nodes meet, is not given"
        raise RecipeError(Problem("several_hosts", message, "--rdzv-endpoint", hint))
    reach = nodes.reach_at(nodes.endpoint, nodes.nnodes, 0, hint, join_timeout_s)
    if run_dir == AUTO:
        message = "--dir is not given, and the nodes would each make a folder of their own"
        raise RecipeError(Problem("missing_value", message, "--dir", "type --dir <a folder that all nodes share>"))
    return reach


def describe_place(nodes: NodeOptions, reach: Reach | None) -> str:
    """Say what was taken from Slurm's environment, and what was not; empty without Slurm."""
    if nodes.of_slurm:
        where = f", which the others reach at {reach.head}" if reach and nodes.is_first else ""
        return f"Slurm job {os.environ[JOB]}: this is node {nodes.node_rank} of {nodes.nnodes}{where}"
    if JOB in os.environ and nodes == NodeOptions() and (idle := idle_nodes(os.environ)):
        others = "another node is" if idle == 1 else f"{idle} other nodes are"
        return (
            f"note: {others} in this job, without part in the run: srun --ntasks-per-node=1 trainspec run ... has all"
        )
    return ""


def earlier_start(run: RunDir, command: Sequence[str]) -> Literal["done", "begun"] | None:
    """Return how far this Slurm job has come with the run before it was started again; None where it has not begun."""
    if JOB not in os.environ or not restarts() or not run.run_json.is_file() or job_of(run) != own_job():
        return None
    if read_run_record(run).command != tuple(command):
        return None
    result = read_result(run)
    return "done" if result and result.status == "done" else "begun"


def heed_no_warning() -> None:
    """Slurm warns every process of a step; the first node heeds it for all."""
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)


def requeueing(run: RunDir, nodes: NodeOptions, console: PrintableConsole, start: Callable[[StopRequests], int]) -> int:
    """Call `start` and return its exit code; in a Slurm job that Slurm may start again, have it do so where that is of
    use. A scheduler repeats its signal without wanting a quicker end; a person at a terminal does."""
    if JOB not in os.environ:
        return start(StopRequests())
    note_job(run, own_job())
    limits = Limits(nodes.nnodes or 1, after_hang=False)
    warning = TimeWarning()
    requests = StopRequests() if sys.stdin.isatty() else PatientRequests()

    def end(code: int) -> None:
        requeue_if_of_use(run, own_job(), code, limits, warned=warning.came, console=console)

    try:
        code = start(requests)
    except TrainspecError as error:
        if error.problems[0].code != FENCED:
            end(error.exit_code)
        raise
    except KeyboardInterrupt:
        end(Interrupted.exit_code)
        raise
    if code != EXIT_DONE:
        end(code)
    return code
