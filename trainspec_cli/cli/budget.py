"""`trainspec budget`: the cost of a portfolio of runs on purchased and on rented machines."""

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
            help="A file of runs, or one recipe, with changes such as cluster.cost.device_price_usd=30000.",
            show_default=False,
        ),
    ],
    per_year: Annotated[
        float, typer.Option("--per-year", metavar="N", help="Number of runs of one recipe per year.")
    ] = 1.0,
    years: Annotated[int, typer.Option("--years", metavar="N", help="Number of years to budget for one recipe.")] = 4,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Compare buying machines with renting them by the hour, by the year and on spot, for a portfolio of runs.

    Prints the number of devices per year, the cash flow of each year, the cost of a run and of a million tokens, the
    break-even time, and the sensitivity to each price. A file has `years` and `runs`; each run has `plan` (the
    arguments of trainspec plan) and `per_year` (as a list: one number for each year).
    """
    found = budget_portfolio(arguments, per_year, years)
    if html:
        write_page(html, render_budget_page(found, page_origin()))
    print(json_text(to_plain(found)) if as_json else render_budget(found))
