"""`trainspec report`: what became of a run, and where the time went."""

from __future__ import annotations

from trainspec_cli.cli.options import AsJson, RunArgument
from trainspec_cli.report.render import render_report
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.find import collect_run
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text


def report(run: RunArgument, as_json: AsJson = False) -> None:
    """Show how a run ended (or stands), its curves, its speed and where the time went."""
    collected = collect_run(run)
    if as_json:
        print(json_text(to_plain(collected)))
    else:
        PrintableConsole().show(render_report(collected))
