"""trainspec: a launcher, planner and engine for training large models under an open training spec.

From Python, what its commands do are functions that return records:

    import trainspec_cli as trainspec

    planned = trainspec.plan("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=32")

Arguments are those of the command line. Where a command would refuse them, TrainspecError is raised, whose `problems`
say what is wrong, where, and what to type. What a function needs is imported when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor, nn

    from trainspec_cli.recipe.keys.run import RunSpec
    from trainspec_cli.reporter.collect import Report
    from trainspec_cli.reporter.plan.labels import PlanReport
    from trainspec_cli.reporter.runs import RunLine
    from trainspec_cli.wings.own_script.attachment.run import AttachedRun


def compose(*arguments: str) -> RunSpec:
    """Return the recipe that `arguments` give, with every value checked; `auto` is left as it is."""
    from trainspec_cli.session.recipe.load import load_for_planning

    return load_for_planning(arguments).spec


def plan(*arguments: str) -> PlanReport:
    """Plan a recipe on a cluster, as `trainspec plan` does: no GPU is needed, and nothing is started. `best` is the
    first layout, or None where nothing fits."""
    from trainspec_cli.session.planning.plan import plan_recipe

    return plan_recipe(arguments)


def launch(*arguments: str, force: bool = False, progress: bool | None = None) -> Report:
    """Train a recipe on this node, as `trainspec launch` does, in processes of their own; return its report when it has
    ended, whose `status` and `reason` say how; `raise_for_status()` raises where it has failed. `progress` shows what
    the command shows while it trains, by default on a terminal and in a notebook. An interrupt (Ctrl-C) lets the run
    write a checkpoint and stop."""
    from trainspec_cli.reporter.console import make_progress_console
    from trainspec_cli.session.launching.session import launch_apart

    run = launch_apart(arguments, force=force, console=make_progress_console(progress))
    return report(str(run.root))


def runs() -> list[RunLine]:
    """Return the runs below this folder or launched from it, the newest first."""
    from trainspec_cli.session.runs.find import runs_here

    return runs_here()


def report(run: str = "last") -> Report:
    """Return the report of a run as it stands: a folder, a name, or `last`."""
    from trainspec_cli.session.runs.diagnose import report_of

    return report_of(run)


def read_weights(run: str = "last", *, step: int | None = None, best: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a run's model by name, on the CPU, as its newest checkpoint holds them, or that of `step`,
    or the one with the lowest held-out loss (`best`). It reads every family of models, and runs no code of the recipe.
    Raises TrainspecError where the checkpoint is damaged, or holds matrices in 4 bits."""
    from trainspec_cli.engine.build.from_run import read_run_weights
    from trainspec_cli.run.exporting import find_checkpoint
    from trainspec_cli.session.runs.find import find_own_run

    found = find_own_run(run)
    return read_run_weights(found, find_checkpoint(found, step, best=best))


def load_model(run: str = "last", *, step: int | None = None, best: bool = False) -> nn.Module:
    """Return a run's model on the CPU in fp32, with the weights of the checkpoint that `read_weights` reads. A model of
    text maps token ids (samples, tokens) to logits (samples, tokens, vocabulary). User-defined blocks are imported."""
    from trainspec_cli.engine.build.from_run import read_run_model
    from trainspec_cli.run.exporting import find_checkpoint
    from trainspec_cli.session.runs.find import find_own_run

    found = find_own_run(run)
    model: nn.Module = read_run_model(found, find_checkpoint(found, step, best=best))
    return model


def attach(checkpoints: str | Path | None = None) -> AttachedRun:
    """Return the run that `trainspec run` has started this script for: its steps, checkpoints and requests to stop.
    `checkpoints`: their folder, by default one in the run's own. Outside of a run it writes no events."""
    from trainspec_cli.core.errors import MachineError, Problem
    from trainspec_cli.core.wings import MISSING_WING, Point, parts_of

    point: Point[Callable[[str | Path | None], AttachedRun]] = Point("attach")
    if not (connects := parts_of(point)):
        hint = "reinstall trainspec: `wings/own_script` is missing"
        raise MachineError(Problem(MISSING_WING, "scripts cannot attach themselves", hint=hint, environment=True))
    return connects[0](checkpoints)
