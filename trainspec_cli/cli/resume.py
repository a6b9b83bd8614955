"""`trainspec resume`: continue a run from its newest complete checkpoint."""

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
    RunArgument,
)
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.signals import interrupt, on_stop_signal

Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="key=value", help="Changes, such as train.max_steps=800.", show_default=False),
]


def resume(
    run: RunArgument,
    changes: Changes = None,
    force: Force = False,
    detach: Detach = False,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    notify: NotifyWhom = "",
    as_json: AsJson = False,
) -> int:
    """Continue a run in its own folder, from its newest complete checkpoint.

    On several nodes without Slurm, type the same command on each of them, with --node-rank.
    """
    from trainspec_cli.session.launching import resume as session  # takes half a second; not needed by the help
    from trainspec_cli.session.launching.nodes import NodeOptions

    nodes = NodeOptions(nnodes, node_rank, rdzv_endpoint)
    with on_stop_signal(interrupt):
        wanted = Notify(notify)
        return session.resume(run, changes or [], nodes, wanted, force=force, as_json=as_json, detach=detach)
