"""`trainspec launch`: train a recipe on this node or several."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import (
    AsJson,
    Detach,
    Endpoint,
    Force,
    NodeRank,
    NotifyWhom,
    NumNodes,
    RecipeArguments,
    Sweeps,
)
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.signals import interrupt, on_stop_signal

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the command, environment and plan, and start nothing.")]

AtOnce = Annotated[
    int, typer.Option("--at-once", metavar="N", min=1, help="Number of runs of a sweep that train at the same time.")
]


def launch(
    arguments: RecipeArguments,
    dry_run: DryRun = False,
    force: Force = False,
    sweep: Sweeps = None,
    at_once: AtOnce = 1,
    detach: Detach = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    notify: NotifyWhom = "",
    as_json: AsJson = False,
) -> int:
    """Train a recipe. Ctrl-C writes a checkpoint and stops (exit code 6); a second Ctrl-C stops immediately.

    On several nodes without Slurm, type the same command on each of them, with --node-rank and a shared run.dir. With
    --sweep, one run per value trains on this node; a table then lists the runs, best first.
    """
    if sweep:
        from trainspec_cli.recipe.rules.check import WING_KEYS  # not needed by the help

        keys = {argument.partition("=")[0] for argument in arguments}
        given = {"--dry-run": dry_run, "--detach": detach, "--nnodes": nnodes is not None}
        paths = [f"{wing.section}.{name}" for wing in WING_KEYS for name in wing.of_one_start]
        given |= {path: path in keys for path in paths}
        if option := next((name for name, is_given in given.items() if is_given), None):
            hint = "leave one out; trainspec sbatch --sweep creates a Slurm array"
            raise RecipeError(Problem("usage", f"{option} and --sweep cannot be combined", option, hint))
        from trainspec_cli.session.launching.sweep import read_sweep
        from trainspec_cli.session.launching.sweep_runs import (
            launch_sweep,
        )  # takes half a second; not needed by the help

        sweeps = [read_sweep(one) for one in sweep]
        with on_stop_signal(interrupt):
            wanted = Notify(notify)
            return launch_sweep(arguments, sweeps, wanted, side_by_side=at_once, force=force, as_json=as_json)
    from trainspec_cli.session.launching import session as session  # takes half a second; not needed by the help
    from trainspec_cli.session.launching.nodes import NodeOptions

    nodes = NodeOptions(nnodes, node_rank, rdzv_endpoint)
    with on_stop_signal(interrupt):
        if dry_run:
            shown = session.show_launch(arguments, nodes, force=force, as_json=as_json)
            print(shown, end="\n" if as_json else "")
            return 0
        wanted = Notify(notify)
        return session.launch(arguments, nodes, wanted, force=force, as_json=as_json, detach=detach)
