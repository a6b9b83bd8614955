"""`trainspec run`: run a user's training command."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from trainspec_cli.cli.options import (
    GRACE_S,
    HANG_S,
    JOIN_TIMEOUT_S,
    MAX_RESTARTS,
    SILENT_S,
    WORK_S,
    AsJson,
    CommandFolder,
    CommandOptions,
    Endpoint,
    Grace,
    HangAfter,
    JoinTimeout,
    MaxRestarts,
    NodeRank,
    NotifyWhom,
    NumNodesRange,
    WorkFor,
)
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.run.notify import Notify
from trainspec_cli.run.signals import interrupt, on_stop_signal

if TYPE_CHECKING:
    from trainspec_cli.wings.own_script.job import CommandSettings

Command = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND...",
        help="The training command, as you would type it without trainspec.",
        show_default=False,
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the command and its environment without starting it.")]


def run(
    command: Command = None,
    folder: CommandFolder = None,
    max_restarts: MaxRestarts = MAX_RESTARTS,
    grace_s: Grace = GRACE_S,
    hang_s: HangAfter = None,
    work_s: WorkFor = WORK_S,
    nnodes: NumNodesRange = None,
    node_rank: NodeRank = 0,
    rdzv_endpoint: Endpoint = None,
    join_timeout_s: JoinTimeout = JOIN_TIMEOUT_S,
    dry_run: DryRun = False,
    notify: NotifyWhom = "",
    as_json: AsJson = False,
) -> int:
    """Run a training command unchanged: `python train.py`, `torchrun ...`, `accelerate launch ...`.

    Steps of torch optimizers are counted. A command that fails after its first step is restarted; Ctrl-C asks it to
    stop. On several nodes, run the same command on each node, with --node-rank and a shared --dir. In a Slurm job, srun
    --ntasks-per-node=1 does this, and trainspec sbatch writes such a job."""
    from trainspec_cli.session.launching.nodes import NodeOptions
    from trainspec_cli.wings.own_script import (
        launching as session,
    )  # deferred: takes half a second, and --help does not need it

    smallest, largest, spares = parse_nodes(nnodes)
    nodes = NodeOptions(largest, node_rank, rdzv_endpoint, smallest, spares)
    wanted = settings_of(CommandOptions(max_restarts, grace_s, hang_s, work_s, join_timeout_s))
    with on_stop_signal(interrupt):
        if dry_run:
            shown = session.show_command(command or [], folder, wanted, nodes, as_json=as_json)
            print(shown, end="\n" if as_json else "")
            return 0
        return session.run_command(command or [], folder, wanted, nodes, Notify(notify), as_json=as_json)


def parse_nodes(text: str | None) -> tuple[int | None, int | None, int]:
    """Return the smallest and largest number of nodes and the number of spares in `[MIN:]MAX[+SPARES]`. Without MIN,
    the smallest number is None. Raises RecipeError."""
    if text is None:
        return None, None, 0
    found = re.fullmatch(r"(?:(\d+):)?(\d+)(?:\+(\d+))?", text)
    if not found or int(found[1] or 0) > int(found[2]):
        message = f"--nnodes is {text}; it must be a number such as 4, a range such as 2:4, or 4+1 with a spare node"
        raise RecipeError(Problem("usage", message, "--nnodes"))
    return (int(found[1]) if found[1] else None), int(found[2]), int(found[3] or 0)


def settings_of(options: CommandOptions) -> CommandSettings:
    from trainspec_cli.wings.own_script.job import CommandSettings  # deferred: loads modules that --help does not need

    usual = options.hang_s is None
    hang_s, silent_s = (HANG_S, SILENT_S) if usual else (options.hang_s or None, options.hang_s or None)
    return CommandSettings(
        options.max_restarts, options.grace_s, hang_s, silent_s, options.work_s, options.join_timeout_s
    )
