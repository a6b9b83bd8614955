"""`trainspec launch`: train a recipe on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Endpoint, Force, NodeRank, NumNodes, RecipeArguments
from trainspec_cli.launch.signals import interrupt, on_stop_signal

DryRun = Annotated[bool, typer.Option("--dry-run", help="Show command, environment and plan; start nothing.")]


def launch(
    arguments: RecipeArguments,
    dry_run: DryRun = False,
    force: Force = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    as_json: AsJson = False,
) -> int:
    """Train a recipe. Ctrl-C writes a checkpoint and stops (exit code 6); a second one stops at once.

    On several nodes without Slurm, give the same command on each, with --node-rank and a run.dir that all share.
    """
    from trainspec_cli.session import launch as session  # half a second, which the help does without
    from trainspec_cli.session.nodes import NodeOptions

    nodes = NodeOptions(nnodes, node_rank, rdzv_endpoint)
    with on_stop_signal(interrupt):
        if dry_run:
            print(session.show_launch(arguments, nodes, force=force, as_json=as_json), end="\n" if as_json else "")
            return 0
        return session.launch(arguments, nodes, force=force, as_json=as_json)
