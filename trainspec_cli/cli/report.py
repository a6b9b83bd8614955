"""`trainspec report`: what became of a run, and where the time went."""

from __future__ import annotations

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.cli.runs import RunArgument
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text

app = typer.Typer(add_completion=False)


@app.command()
def report(run: RunArgument, as_json: AsJson = False) -> None:
    """Show how a run ended (or stands), its curves, its speed and where the time went."""
    from trainspec_cli.cli.console import PrintableConsole
    from trainspec_cli.cli.runs import find_run, refusing_closed
    from trainspec_cli.launch.job.claim import is_running
    from trainspec_cli.launch.slurm.queue import Queue
    from trainspec_cli.report.collect import collect
    from trainspec_cli.report.render import render_report

    run_dir = find_run(run)
    with refusing_closed(run):
        collected = collect(run_dir.root, running=is_running(run_dir), queued=Queue().holds(run_dir))
    if as_json:
        print(json_text(to_plain(collected)))
    else:
        PrintableConsole().print(render_report(collected))
