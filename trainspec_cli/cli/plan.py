"""`trainspec plan`: the layout of a run, whether it fits in memory, its time and its cost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import RenderableType

from trainspec_cli.cli.options import AsJson, Html, RecipeArguments, Sweeps, page_origin, write_page
from trainspec_cli.core.errors import PlanError, Problem, RecipeError
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.plan.json import plan_as_json, sweep_as_json
from trainspec_cli.reporter.plan.labels import PlanReport, SweepPoint, SweepReport
from trainspec_cli.reporter.plan.text import render_plan, render_sweep
from trainspec_cli.session.launching.sweep import read_sweep, sweep_arguments
from trainspec_cli.session.planning.plan import names_disturbance, plan_recipe, require_fit

Trace = Annotated[
    bool, typer.Option(help="Also run the engine's step with fake tensors, and compare the plan with it.")
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Also print memory and step time by part, communication, rejected layouts and all assumptions.",
    ),
]

PIPED_WIDTH = 150
"""Number of columns to assume without a terminal."""


def plan(
    arguments: RecipeArguments,
    as_json: AsJson = False,
    html: Html = None,
    sweep: Sweeps = None,
    trace: Trace = False,
    verbose: Verbose = False,
) -> None:
    """Rank the layouts of a recipe on a cluster, and forecast the run: time, goodput, energy, carbon, money.

    Needs no GPU and starts nothing. Exit code 3 means that nothing fits; the output lists changes that would help. With
    disturb=NAME|FILE the run is also simulated under a disturbance: its speed with and without the scheduler. Without a
    recipe, model=NAME cluster=NAME is planned with typical values for everything else, which the plan lists.
    """
    if not sweep:
        planned = plan_recipe(arguments, trace=trace)
        if html:
            from trainspec_cli.reporter.plan.page import (
                render_plan_page,
            )  # loads charts, which text output does not need

            write_page(html, render_plan_page(planned, page_origin()))
        if as_json:
            print(json_text(plan_as_json(planned)))
        else:
            _show(lambda width: render_plan(planned, width, verbose=verbose))
        # Print the text before any error, because it states what would fit.
        if not planned.best:
            _refuse(planned, as_json)
    elif trace:
        raise RecipeError(Problem("usage", "--trace and --sweep cannot be combined", hint="leave one out"))
    elif verbose:
        raise RecipeError(Problem("usage", "--verbose and --sweep cannot be combined", hint="leave one out"))
    elif names_disturbance(arguments):
        raise RecipeError(Problem("usage", "disturb= and --sweep cannot be combined", hint="leave one out"))
    else:
        read = [read_sweep(one) for one in sweep]
        keys = [key for key, _ in read]
        points = sweep_arguments(arguments, read)
        swept = SweepReport(
            tuple(SweepPoint(dict(zip(keys, values, strict=True)), plan_recipe(point)) for values, point in points)
        )
        if html:
            from trainspec_cli.reporter.plan.page import (
                render_sweep_page,
            )  # loads charts, which text output does not need

            write_page(html, render_sweep_page(swept, page_origin()))
        if as_json:
            print(json_text(sweep_as_json(swept)))
        else:
            _show(lambda _: render_sweep(swept))
        if not any(point.plan.best for point in swept.points):
            _refuse(swept.points[-1].plan, as_json)


def _show(render: Callable[[int], RenderableType]) -> None:
    # Without a terminal, rich would assume 80 columns and wrap the table of layouts.
    console = PrintableConsole(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.show(render(console.width))


def _refuse(planned: PlanReport, as_json: bool) -> None:
    """Raise an error for a plan without a best layout. With `--json`, the output already shows that there is none."""
    if as_json:
        raise typer.Exit(PlanError.exit_code)
    require_fit(planned)
