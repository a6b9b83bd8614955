"""`trainspec report`: what became of a run, and where the time went."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.cli.runs import RunArgument

app = typer.Typer(add_completion=False)


@app.command()
def report(run: RunArgument, as_json: AsJson = False) -> None:
    """Show how a run ended (or stands), its curves, its speed and where the time went."""
    from rich.console import Console

    from trainspec_cli.cli.runs import find_run
    from trainspec_cli.launch.claim import is_running
    from trainspec_cli.launch.slurm.queue import Queue
    from trainspec_cli.report.collect import collect
    from trainspec_cli.report.render import render_report

    run_dir = find_run(run)
    collected = collect(run_dir.root, running=is_running(run_dir), queued=Queue().holds(run_dir))
    if as_json:
        typer.echo(json.dumps(_finite(asdict(collected)), indent=2, allow_nan=False))
    else:
        Console().print(render_report(collected))


def _finite(value: Any) -> Any:
    """null for the numbers that JSON has no words for, such as the loss of a run that has diverged."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
