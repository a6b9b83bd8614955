"""`trainspec report`: the outcome of a run, and where its time went."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Html, RunArgument, page_origin, write_page
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.render import render_report
from trainspec_cli.reporter.run_page import render_run_page
from trainspec_cli.session.runs.diagnose import composed_of, report_of

Csv = Annotated[
    Path | None, typer.Option("--csv", metavar="FILE", help="Also write all curves to one table, with a row per step.")
]


def report(run: RunArgument, as_json: AsJson = False, html: Html = None, csv_file: Csv = None) -> None:
    """Show the state or outcome of a run, its curves, its speed and where the time went."""
    collected = report_of(run)
    if html:
        write_page(html, render_run_page(collected, composed_of(collected), page_origin()))
    if csv_file:
        columns = collected.curves()
        # The table is written in one piece, so that a full disk does not leave a partial table.
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([list(columns), *zip(*columns.values(), strict=True)])
        write_page(csv_file, text.getvalue(), "--csv")
    if as_json:
        print(json_text(to_plain(collected)))
    else:
        PrintableConsole().show(render_report(collected))
