"""`trainspec logs`: the lines that a run has shown."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import RunArgument

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until the run ends.")]


def logs(run: RunArgument, follow: Follow = False) -> None:
    """Print what a run has shown since it was launched. What each worker wrote itself lies in its folder `logs`."""
    from trainspec_cli.session.runs.find import find_run
    from trainspec_cli.session.runs.follow import read_run_log

    try:
        for text in read_run_log(find_run(run), follow=follow):
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not follow:
            raise
