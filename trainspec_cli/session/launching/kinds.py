"""Kinds of runs, which differ in how a run is resumed (including in a Slurm job), and in how its outcome is determined
and shown. Recipe runs are defined here; plug-ins add other kinds at `RUN_KINDS`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainspec_cli.core.environment_names import RENDEZVOUS
from trainspec_cli.core.errors import EXIT_DONE, Stopped
from trainspec_cli.core.wings import Point, part_named
from trainspec_cli.recipe.compose.folders import show_path
from trainspec_cli.run.folder import generations
from trainspec_cli.run.folder.paths import RECIPE, RunDir
from trainspec_cli.run.folder.record import kind_of_run, read_plan, read_plan_of_all_nodes
from trainspec_cli.run.outcome import RunOutcome, conclude_recipe
from trainspec_cli.session.launching.in_slurm import Limits

if TYPE_CHECKING:
    from trainspec_cli.reporter.console import RunConsole
    from trainspec_cli.run.backend.nodes.backend import Reach
    from trainspec_cli.run.failure import WorkerFailure
    from trainspec_cli.run.job.job import Job
    from trainspec_cli.run.notify import Notify
    from trainspec_cli.run.signals import StopRequests
    from trainspec_cli.run.supervise import Ending
    from trainspec_cli.session.launching.nodes import NodeOptions


class RunKind(Protocol):
    @property
    def name(self) -> str: ...

    def resume(
        self,
        run: RunDir,
        changes: Sequence[str],
        nodes: NodeOptions,
        notify: Notify,
        *,
        force: bool,
        as_json: bool,
        detach: bool,
    ) -> int:
        """Continue a run; return the exit code of this command. Raises TrainspecError if the run is rejected or
        fails."""

    def run_in_job(self, run: RunDir, reach: Reach, console: RunConsole, requests: StopRequests, *, force: bool) -> int:
        """Start or continue a submitted run on the nodes of its Slurm job; return its exit code. Raises TrainspecError
        if the run is rejected or fails."""

    def limits(self, run: RunDir) -> Limits:
        """Return the limits on requeuing the run's Slurm job."""

    def decide(self, job: Job, ending: Ending) -> RunOutcome:
        """Return the outcome of a run whose processes have ended."""

    def hint(self, job: Job, outcome: RunOutcome) -> str:
        """Return what to do after a failure; empty if restarting would not continue the run."""

    def last_lines(self, job: Job, outcome: RunOutcome) -> str:
        """Return the last lines to show for a run that has not failed."""

    def start_again(self, run: RunDir) -> str:
        """Return the command that continues a run after it has ended."""


class RecipeRuns:
    name = RECIPE

    def resume(
        self,
        run: RunDir,
        changes: Sequence[str],
        nodes: NodeOptions,
        notify: Notify,
        *,
        force: bool,
        as_json: bool,
        detach: bool,
    ) -> int:
        from trainspec_cli.session.launching.resume import resume_recipe  # deferred to avoid an import cycle

        return resume_recipe(run, changes, nodes, notify, force=force, as_json=as_json, detach=detach)

    def run_in_job(self, run: RunDir, reach: Reach, console: RunConsole, requests: StopRequests, *, force: bool) -> int:
        from trainspec_cli.session.launching.resume import run_recipe_in_job  # deferred to avoid an import cycle

        return run_recipe_in_job(run, reach, console, requests, force=force)

    def limits(self, run: RunDir) -> Limits:
        plan = read_plan(run)
        options = plan.spec.cluster.slurm
        return Limits(plan.num_nodes, options.max_requeues, options.exclude)

    def decide(self, job: Job, ending: Ending) -> RunOutcome:
        return conclude_recipe(job, ending)

    def hint(self, job: Job, outcome: RunOutcome) -> str:
        step = job.run.newest_step
        node = outcome.explanation.node if outcome.explanation else None
        begin = f"continue from step {step}" if step else "start it again from the beginning"
        if node is not None:
            begin = f"{about_node(job, node, by_hand=not job.run.job_sbatch.is_file())}; {begin}"
        elif not step:
            return ""
        return f"{begin}: {command_to_resume(job.run)}"

    def start_again(self, run: RunDir) -> str:
        return command_to_resume(run)

    def last_lines(self, job: Job, outcome: RunOutcome) -> str:
        run = job.run
        folder = f"run folder  {shown(run.root)}"
        report = f"report      trainspec report {quoted(run)}"
        if outcome.exit_code == EXIT_DONE:
            return f"done after {outcome.result.steps} steps\n{folder}\n{report}"
        if outcome.exit_code == Stopped.exit_code:
            stopped = f"stopped with a checkpoint at step {run.newest_step}"
            return f"{stopped}\n{folder}\n{report}\nresume      {command_to_resume(run)}"
        return f"interrupted before the first checkpoint\n{folder}"


def about_node(job: Job, node: WorkerFailure, *, by_hand: bool) -> str:
    """Return what to do about a node that was lost or did not join. `by_hand`: whether a user typed the command on each
    node, instead of Slurm running it."""
    if node.rank == 0 or job.run.job_sbatch.is_file():  # this process started them and logs their output
        return f"see {shown(job.torchrun_log)}"
    if by_hand and node.never_came:
        return f"also start node {node.rank}: run the same command there with --node-rank {node.rank}"
    return f"see what node {node.rank} printed"


def command_to_resume(run: RunDir) -> str:
    """Return the command that continues the run. It is the same on all nodes, except for --node-rank."""
    if run.job_sbatch.is_file():
        return f"sbatch {shlex.quote(shown(run.job_sbatch))}"
    command = f"trainspec resume {quoted(run)}"
    start = generations.read(run, generations.newest(run))
    if start is None or start.own or len(start.nodes) < 2:
        return command
    plan = read_plan_of_all_nodes(run)
    if plan.spec.cluster.manager != "none":
        return command
    nodes = f"--nnodes {plan.num_nodes} --node-rank I"
    endpoint = start.folder or start.rendezvous.get(RENDEZVOUS, "HOST:PORT")
    return f"{command} {nodes} --rdzv-endpoint {endpoint} (on each node; I is its number)"


def quoted(run: RunDir) -> str:
    return shlex.quote(shown(run.root))


def shown(path: Path) -> str:
    """Return the path as a user would type it from the current folder."""
    return show_path(path, Path.cwd())


RECIPE_RUNS = RecipeRuns()
RUN_KINDS: Point[RunKind] = Point("run_kinds")


def kind_of(run: RunDir) -> RunKind:
    """Return the kind of a run. Raises MachineError if its plug-in is missing, and UnreadableFileError."""
    return part_named(RUN_KINDS, kind_of_run(run), RECIPE_RUNS)
