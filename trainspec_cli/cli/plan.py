"""`trainspec plan`: the layout of a run, whether it fits in memory, its time and its cost."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
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

Compare = Annotated[
    list[str] | None,
    typer.Option(
        "--compare",
        metavar="CHANGES",
        help="Also plan with these changes, such as 'cluster=b200 cluster.num_nodes=4', and show the plans side by "
        "side; may be repeated.",
    ),
]
Engines = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME,...|all",
        help="Plan the run on other engines as well: options of the group `framework`; all: "
        "trainspec,megatron,torchtitan.",
    ),
]
ENGINE = "framework"
ENGINES = "trainspec,megatron,torchtitan"
CHANGES = "changes"

PIPED_WIDTH = 150
"""Number of columns to assume without a terminal."""
PIPED_SWEEP_WIDTH = 200
"""The same for several plans side by side, whose table has more columns."""


def plan(
    arguments: RecipeArguments,
    as_json: AsJson = False,
    html: Html = None,
    sweep: Sweeps = None,
    compare: Compare = None,
    engine: Engines = None,
    trace: Trace = False,
    verbose: Verbose = False,
) -> None:
    """Rank the layouts of a recipe on a cluster, and forecast the run: time, goodput, energy, carbon, money.

    Needs no GPU and starts nothing. Exit code 3 means that nothing fits; the output lists changes that would help. With
    disturb=NAME|FILE the run is also simulated under a disturbance: its speed with and without the scheduler. Without a
    recipe, model=NAME cluster=NAME is planned with typical values for everything else, which the plan lists.
    """
    points = list(_points(arguments, sweep or [], compare or [], engine))
    if not points:
        planned = plan_recipe(arguments, trace=trace)
        if html:
            from trainspec_cli.reporter.plan.page import render_plan_page  # loads charts

            write_page(html, render_plan_page(planned, page_origin()))
        if as_json:
            print(json_text(plan_as_json(planned)))
        else:
            _show(lambda width: render_plan(planned, width, verbose=verbose))
        # Print the text before any error, because it states what would fit.
        if not planned.best:
            _refuse(planned, as_json)
        return
    details = {"--trace": trace, "--verbose": verbose, "disturb=": names_disturbance(arguments)}
    if asked := next((name for name, is_asked in details.items() if is_asked), ""):
        message = f"{asked} describes one plan, and --sweep, --compare and --engine print several"
        raise RecipeError(Problem("usage", message, hint="leave one out"))
    swept = SweepReport(tuple(SweepPoint(values, plan_recipe(point)) for values, point in points))
    if len({point.plan.spec.model.unit for point in swept.points}) > 1:
        message = "the plans train on different units (tokens and samples), which no column compares"
        raise RecipeError(Problem("usage", message, hint="compare models of one kind"))
    if html:
        from trainspec_cli.reporter.plan.page import render_sweep_page  # loads charts, which text output does not need

        write_page(html, render_sweep_page(swept, page_origin()))
    if as_json:
        print(json_text(sweep_as_json(swept)))
    else:
        _show(lambda width: render_sweep(swept, width), PIPED_SWEEP_WIDTH)
    if not any(point.plan.best for point in swept.points):
        _refuse(swept.points[-1].plan, as_json)


def _points(
    arguments: Sequence[str], sweeps: Sequence[str], compared: Sequence[str], engines: str | None
) -> Iterator[tuple[dict[str, str], list[str]]]:
    """Yield (values, arguments) for each plan to show side by side: every combination of the swept values, or of the
    engines, with the recipe as given and with each list of changes."""
    read = [read_sweep(one) for one in sweeps]
    if engines:
        read.append(read_sweep(f"{ENGINE}={ENGINES if engines == 'all' else engines}"))
    if not read and not compared:
        return
    keys = [key for key, _ in read]
    for changes in ("", *compared):
        try:
            added = shlex.split(changes)
        except ValueError as error:
            message = f"--compare {changes} cannot be read: {error}"
            raise RecipeError(Problem("usage", message, hint="close the quote")) from error
        changed = {argument.partition("=")[0] for argument in added}
        if both := changed.intersection(keys):
            message = f"--compare {changes} sets {', '.join(sorted(both))}, which is swept as well"
            raise RecipeError(Problem("usage", message, hint="leave one of them out"))
        kept = [argument for argument in arguments if argument.partition("=")[0] not in changed]
        for values, point in sweep_arguments([*kept, *added], read):
            about = {CHANGES: changes or "none"} if compared else {}
            yield about | dict(zip(keys, values, strict=True)), point


def _show(render: Callable[[int], RenderableType], piped_width: int = PIPED_WIDTH) -> None:
    # Without a terminal, rich would assume 80 columns and wrap the table of layouts.
    console = PrintableConsole(highlight=False, width=None if sys.stdout.isatty() else piped_width)
    console.show(render(console.width))


def _refuse(planned: PlanReport, as_json: bool) -> None:
    """Raise an error for a plan without a best layout. With `--json`, the output already shows that there is none."""
    if as_json:
        raise typer.Exit(PlanError.exit_code)
    require_fit(planned)
