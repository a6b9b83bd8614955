"""`trainspec stop`: end a run from another terminal."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RunArgument
from trainspec_cli.recipe.json_text import json_text

Now = Annotated[bool, typer.Option("--now", help="Do not wait for a checkpoint.")]


def stop(run: RunArgument, now: Now = False, as_json: AsJson = False) -> None:
    """Ask a run to write a checkpoint and exit, like Ctrl-C in its own terminal, and wait until it has ended."""
    from trainspec_cli.session.runs.find import find_own_run
    from trainspec_cli.session.runs.follow import stop as stop_run

    found = find_own_run(run)
    asked = "asked to stop" if now else "asked to write a checkpoint and stop"
    # Print this on stderr before the wait, which may take as long as a step and a checkpoint.
    status = stop_run(found, at_once=now, on_asked=lambda: print(f"{found.root}: {asked}", file=sys.stderr))
    if as_json:
        print(json_text({"run": str(found.root), "status": status, "step": found.newest_step}))
        return
    print(f"{status}; its newest checkpoint is from step {found.newest_step}" if found.newest_step else status)
    if status != "done" and found.newest_step:
        from trainspec_cli.session.launching.kinds import kind_of  # takes half a second; not needed by the help

        print(f"resume      {kind_of(found).start_again(found)}")
