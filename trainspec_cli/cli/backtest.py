"""`trainspec backtest FILE.csv`: predict every row of a table of measured runs, and print the errors."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.yaml_file import read_yaml
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import FITTED_SOURCES, fit_table, report
from trainspec_cli.planner.validation.backtest import backtest as run_backtest
from trainspec_cli.planner.validation.columns import COLUMNS
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.backtest import render_backtest, render_scatter
from trainspec_cli.session.calibration.table import read_rows, write_template


def backtest(
    file: Annotated[Path, typer.Argument(help="The table; --template prints its columns.")],
    as_json: AsJson = False,
    fit: Annotated[Path | None, typer.Option(help="Write efficiencies fitted to the rows to this YAML file.")] = None,
    profile: Annotated[Path | None, typer.Option(help="Predict with the efficiencies in this YAML file.")] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Write a table with an example row to FILE, and print all columns.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Plot predicted against measured step times to this SVG file.")
    ] = None,
) -> None:
    """Predict every row with exactly the layout given in it, and print the errors by source, model and chip."""
    if template:
        write_template(file)
        width = max(map(len, COLUMNS))
        print("\n".join([f"wrote {file}", "", *(f"{name:<{width}}  {about}" for name, about in COLUMNS.items())]))
        return
    if profile is None:
        eff = Efficiency()
    else:
        try:
            content = read_yaml(profile)
            given = content.get("efficiency") if isinstance(content, dict) else None
            if not isinstance(given, dict):
                raise ValueError("it has no `efficiency` section")
            values = {}
            for name, value in given.items():
                values[name] = float(value) if isinstance(value, (int, float, str)) else math.nan
                if not 0 < values[name] < math.inf:
                    raise ValueError("an efficiency must be a number above 0")
            eff = Efficiency(**values)
        except (OSError, TypeError, ValueError) as error:
            message = f"{profile} is not a profile of efficiencies: {error}"
            hint = "write one with trainspec backtest FILE.csv --fit PROFILE.yaml"
            raise RecipeError(Problem(code="wrong_profile", message=message, file=str(profile), hint=hint)) from error
    result = run_backtest(read_rows(file), eff)
    if fit is not None:
        lines = [f"  {name}: {value:.4e}" for name, value in fit_table(result, eff).as_dict().items()]
        head = (
            "# Efficiencies fitted to measured runs; put them under `cluster:`, or pass them to `backtest --profile`."
        )
        fit.write_text("\n".join([head, "efficiency:", *lines, ""]), encoding="utf-8")
    if plot is not None:
        plot.write_text(render_scatter(result.points()), encoding="utf-8")
    found = report(result, FITTED_SOURCES if profile is None else ())
    print(json_text(to_plain(found)) if as_json else render_backtest(found))
