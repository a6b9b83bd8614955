"""A budget in the terminal and on its page."""

import re
from dataclasses import replace

from lab.recorded import Recorded

from trainspec_cli.recipe.results.tables import Budget, BudgetedRun, BudgetYear, Sensitivity
from trainspec_cli.reporter.budget import render_budget, render_budget_page
from trainspec_cli.reporter.page.parts import PageOrigin

WAYS = ("owned", "on_demand", "reserved", "spot")
USD = dict(zip(WAYS, (9e6, 8e6, 1.2e7, 6e6), strict=True))
PARTS = {"machines": 1e7, "operation": 5e5, "staff": 0.0, "space": 0.0, "electricity": 1e5, "resale": -2e6}
RUN = BudgetedRun("llama <b>", (2.0, 3.0), 128, 86_400.0, 90_000.0, 1e12, 1e9, USD, dict.fromkeys(WAYS, 0.125))
YEAR = BudgetYear(1, 6144.0, 128, 128, 0, 0.5, PARTS, USD)
BUDGET = Budget(
    cluster="h100",
    accelerator="H100",
    runs=(RUN,),
    years=(YEAR, replace(YEAR, year=2, bought_devices=0, sold_devices=128)),
    usd=USD,
    worth_usd=3e6,
    break_even_months=13.25,
    break_even_utilisation=0.533,
    cumulated_usd={way: tuple(1e6 * month for month in range(25)) for way in WAYS},
    sensitivities=(Sensitivity("cluster.cost.device_price_usd", 3e4, 5e4, USD, {**USD, "owned": 1.1e7}),),
)


def test_what_the_terminal_shows(recorded: Recorded) -> None:
    recorded(render_budget(BUDGET))


def test_what_never_pays_is_said() -> None:
    shown = render_budget(replace(BUDGET, break_even_months=None, break_even_utilisation=None))
    assert re.search(r"^buying pays +not ", shown, re.MULTILINE) and "at no utilisation" in shown


def test_a_way_that_is_missing_has_no_column() -> None:
    usd = {way: USD[way] for way in WAYS[:3]}
    run = replace(RUN, spot_wall_s=None, usd=usd)
    each = replace(BUDGET.sensitivities[0], low_usd=usd, high_usd=usd)
    shown = render_budget(replace(BUDGET, usd=usd, runs=(run,), sensitivities=(each,)))
    assert "rent on spot" not in shown and "never ends" in shown


def test_the_page_draws_every_way_and_escapes_what_it_is_given() -> None:
    page = render_budget_page(BUDGET, PageOrigin("2026-11-24", "1.0", "trainspec budget"))
    assert page.count("<polyline") == 4 and "llama &lt;b&gt;" in page and "<b>llama" not in page
    for text in ("13.2 months", "53.3%", "-$1M to -$3M", "buy", "rent by the hour", "Cash over time"):
        assert text in page
