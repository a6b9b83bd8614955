"""`trainspec run`: run a training command of the user's own."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Endpoint, NodeRank, NotifyCommand, NumNodes, Webhook
from trainspec_cli.launcher.notify import Notify
from trainspec_cli.launcher.signals import interrupt, on_stop_signal

HANG_S, SILENT_S = 600.0, 1800.0

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- COMMAND...", help="The command, as it is typed without trainspec.", show_default=False),
]
Folder = Annotated[
    str | None,
    typer.Option("--dir", metavar="RUN", help="The run's folder; by default one of its own below ./runs."),
]
MaxRestarts = Annotated[
    int,
    typer.Option("--max-restarts", metavar="N", min=0, help="Starts after failures, in the whole job."),
]
Grace = Annotated[
    float,
    typer.Option("--grace-s", metavar="S", min=0, help="Time to save and end in, once asked to stop."),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-s",
        metavar="S",
        min=0,
        help="Without a step or a sign of work for so long it hangs; 0: never.",
        show_default=f"{HANG_S:g}; {SILENT_S:g} until a step is counted",
    ),
]
WorkFor = Annotated[
    float,
    typer.Option(
        "--work-s", metavar="S", min=0, help="Where no step is counted: start again what has worked for so long."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show command and environment; start nothing.")]


def run(
    command: Command = None,
    folder: Folder = None,
    max_restarts: MaxRestarts = 3,
    grace_s: Grace = 60.0,
    hang_s: HangAfter = None,
    work_s: WorkFor = 300.0,
    nnodes: NumNodes = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    dry_run: DryRun = False,
    notify: NotifyCommand = "",
    webhook: Webhook = "",
    as_json: AsJson = False,
) -> int:
    """Run a command that trains, unchanged: `python train.py`, `torchrun ...`, `accelerate launch ...`.

    Optimizer steps of torch are counted. What fails after its first step is started again; Ctrl-C asks it to stop.
    On several nodes, give the same command on each, with --node-rank and a --dir that all share.
    """
    from trainspec_cli.launcher.own_command.job import Wanted
    from trainspec_cli.session import own_command as session  # half a second, which the help does without
    from trainspec_cli.session.nodes import NodeOptions

    nodes = NodeOptions(nnodes, node_rank, rdzv_endpoint)
    given, usual = hang_s or None, hang_s is None
    wanted = Wanted(max_restarts, grace_s, HANG_S if usual else given, SILENT_S if usual else given, work_s)
    with on_stop_signal(interrupt):
        if dry_run:
            shown = session.show_command(command or [], folder, wanted, nodes, as_json=as_json)
            print(shown, end="\n" if as_json else "")
            return 0
        return session.run_command(command or [], folder, wanted, nodes, Notify(notify, webhook), as_json=as_json)
