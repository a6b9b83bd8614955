"""trainspec: a launcher, planner and engine for training large models under an open training spec.

From Python, its commands are functions that return records:

    import trainspec_cli as trainspec

    planned = trainspec.plan("recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=32")

Arguments are the same as on the command line. If a command would reject them, TrainspecError is raised; its `problems`
say what is wrong, where, and what to type instead. Each function imports what it needs when it is called.
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
    """Return the recipe specified by `arguments`, with every value checked. Values of `auto` are not resolved."""
    from trainspec_cli.session.recipe.load import load_for_planning

    return load_for_planning(arguments).spec


def plan(*arguments: str) -> PlanReport:
    """Plan a recipe on a cluster, as `trainspec plan` does, without a GPU and without starting anything. `best` is the
    first layout; None if nothing fits."""
    from trainspec_cli.session.planning.plan import plan_recipe

    return plan_recipe(arguments)


def launch(*arguments: str, force: bool = False, progress: bool | None = None) -> Report:
    """Train a recipe on this node in separate processes, as `trainspec launch` does. Return a report when the run has
    ended: its `status` and `reason` say how, and `raise_for_status()` raises an error if the run failed. `progress`:
    show the same progress as the command; by default only on a terminal and in a notebook. An interrupt (Ctrl-C) lets
    the run write a checkpoint and stop."""
    from trainspec_cli.reporter.console import make_progress_console
    from trainspec_cli.session.launching.session import launch_apart

    run = launch_apart(arguments, force=force, console=make_progress_console(progress))
    return report(str(run.root))


def runs() -> list[RunLine]:
    """Return the runs below this folder or launched from it, newest first."""
    from trainspec_cli.session.runs.find import runs_here

    return runs_here()


def report(run: str = "last") -> Report:
    """Return the current report of a run, which is specified by folder, by name, or as `last`."""
    from trainspec_cli.session.runs.diagnose import report_of

    return report_of(run)


def read_weights(run: str = "last", *, step: int | None = None, best: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a run's model by name, on the CPU, from its newest checkpoint, the one from `step`, or the
    one with the lowest held-out loss (`best`). This works for every model family, and runs no code from the recipe.
    Raises TrainspecError if the checkpoint is damaged or contains 4-bit matrices."""
    from trainspec_cli.engine.build.from_run import read_run_weights
    from trainspec_cli.run.exporting import find_checkpoint
    from trainspec_cli.session.runs.find import find_own_run

    found = find_own_run(run)
    return read_run_weights(found, find_checkpoint(found, step, best=best))


def load_model(run: str = "last", *, step: int | None = None, best: bool = False) -> nn.Module:
    """Return a run's model on the CPU in fp32, with the weights of the checkpoint that `read_weights` reads. A language
    model maps token IDs (samples, tokens) to logits (samples, tokens, vocabulary). User-defined blocks are imported."""
    from trainspec_cli.engine.build.from_run import read_run_model
    from trainspec_cli.run.exporting import find_checkpoint
    from trainspec_cli.session.runs.find import find_own_run

    found = find_own_run(run)
    model: nn.Module = read_run_model(found, find_checkpoint(found, step, best=best))
    return model


def attach(checkpoints: str | Path | None = None) -> AttachedRun:
    """Return the run for which `trainspec run` started this script, with its steps, checkpoints and requests to stop.
    `checkpoints`: the folder for checkpoints, by default in the run folder. Without a run, no events are written."""
    from trainspec_cli.core.errors import MachineError, Problem
    from trainspec_cli.core.wings import MISSING_WING, Point, parts_of

    point: Point[Callable[[str | Path | None], AttachedRun]] = Point("attach")
    if not (connects := parts_of(point)):
        hint = "reinstall trainspec: `wings/own_script` is missing"
        raise MachineError(
            Problem(MISSING_WING, "this installation cannot attach scripts to runs", hint=hint, environment=True)
        )
    return connects[0](checkpoints)
