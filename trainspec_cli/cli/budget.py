"""`trainspec budget`: what a portfolio of runs costs on machines that are bought, and on rented ones."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, Html, page_origin, write_page
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.budget import render_budget, render_budget_page
from trainspec_cli.session.planning.budget import budget_portfolio


def budget(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE.yaml|recipe=NAME|key=value",
            help="A file of runs, or one recipe, and what to change of it: cluster.cost.device_price_usd=30000.",
            show_default=False,
        ),
    ],
    per_year: Annotated[float, typer.Option("--per-year", metavar="N", help="How often one recipe is run.")] = 1.0,
    years: Annotated[int, typer.Option("--years", metavar="N", help="Years of one recipe's budget.")] = 4,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Set buying machines beside renting them by the hour, by the year and on spot, for a portfolio of runs.

    Prints how many devices are needed and when, the cash of each year, what a run and a million tokens cost, when
    buying has paid, and how much each price matters. A file has `years` and `runs`, each with `plan` (the arguments of
    trainspec plan) and `per_year` (a list: by year).
    """
    found = budget_portfolio(arguments, per_year, years)
    if html:
        write_page(html, render_budget_page(found, page_origin()))
    print(json_text(to_plain(found)) if as_json else render_budget(found))
