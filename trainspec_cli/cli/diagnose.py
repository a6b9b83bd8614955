"""`trainspec diagnose`: report what is slowing down a run, where, since when, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Html, RunArgument, page_origin, write_page
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.verdicts import (
    NO_VERDICTS_WITHOUT_PLAN,
    describe_event,
    render_verdicts,
    render_verdicts_page,
)
from trainspec_cli.run.folder.record import has_plan
from trainspec_cli.session.runs.diagnose import diagnose_run, follow_verdicts, report_of, trace_to
from trainspec_cli.session.runs.find import find_run

Watch = Annotated[bool, typer.Option("--watch", help="Follow the run, and print changes until it ends.")]


Trace = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE", help="Write a trace of all ranks, for ui.perfetto.dev.")
]


def diagnose(
    run: RunArgument, as_json: AsJson = False, html: Html = None, watch: Watch = False, trace: Trace = None
) -> None:
    """Report what is slowing down a run, or has slowed it down: cause, place, cost, evidence and remedy, most severe
    first."""
    if trace is not None:
        trace_to(run, trace)
    # Flush each line, so that a program reading from a pipe sees a verdict as soon as it is found.
    for event in follow_verdicts(run) if watch else ():
        shown = json_text(to_plain(event), indent=None) if as_json else describe_event(event)
        print(shown, flush=True)
    if html:
        report = report_of(run)
        verdicts = report.verdicts
        write_page(html, render_verdicts_page(report, page_origin()))
    else:
        verdicts = diagnose_run(run)
    if as_json:
        found = {"verdicts": [to_plain(one) for one in verdicts]}
        print(json_text(found, indent=None if watch else 2))
    elif not verdicts and not has_plan(find_run(run)):
        print(NO_VERDICTS_WITHOUT_PLAN)
    else:
        PrintableConsole().show(render_verdicts(verdicts))
