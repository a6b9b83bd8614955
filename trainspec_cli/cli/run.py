"""`trainspec run`: run a training command of the user's own."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, NotifyCommand, Webhook
from trainspec_cli.launcher.notify import Notify
from trainspec_cli.launcher.signals import interrupt, on_stop_signal

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
    float,
    typer.Option(
        "--hang-s", metavar="S", min=0, help="Without a step or a sign of work for so long it hangs; 0: never."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show command and environment; start nothing.")]


def run(
    command: Command = None,
    folder: Folder = None,
    max_restarts: MaxRestarts = 3,
    grace_s: Grace = 60.0,
    hang_s: HangAfter = 600.0,
    dry_run: DryRun = False,
    notify: NotifyCommand = "",
    webhook: Webhook = "",
    as_json: AsJson = False,
) -> int:
    """Run a command that trains, unchanged: `python train.py`, `torchrun ...`, `accelerate launch ...`.

    Optimizer steps of torch are counted. What fails after its first step is started again; Ctrl-C asks it to stop.
    """
    from trainspec_cli.launcher.own_command.job import Wanted
    from trainspec_cli.session import own_command as session  # half a second, which the help does without

    wanted = Wanted(max_restarts, grace_s, hang_s or None)
    with on_stop_signal(interrupt):
        if dry_run:
            print(session.show_command(command or [], folder, wanted, as_json=as_json), end="\n" if as_json else "")
            return 0
        return session.run_command(command or [], folder, wanted, Notify(notify, webhook), as_json=as_json)
