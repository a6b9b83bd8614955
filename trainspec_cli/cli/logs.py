"""`trainspec logs`: print the output of a run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import RunArgument

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until the run ends.")]


def logs(run: RunArgument, follow: Follow = False) -> None:
    """Print the output of a run since its launch. Each worker's output is in the run's `logs` folder."""
    from trainspec_cli.session.runs.find import find_run
    from trainspec_cli.session.runs.follow import read_run_log

    try:
        for text in read_run_log(find_run(run), follow=follow):
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not follow:
            raise
