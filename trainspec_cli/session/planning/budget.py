"""The budget of a portfolio: plan its runs on hourly and spot nodes, and sum the costs over the years."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.reading.files import exists
from trainspec_cli.planner.run.budget import PortfolioRun, make_budget, spot_reliability
from trainspec_cli.planner.run.forecast import forecast_run, rental_price
from trainspec_cli.recipe.compose.folders import locate, read_yaml
from trainspec_cli.recipe.field_types import NonNegativeFloat, Range
from trainspec_cli.recipe.keys.cluster import ClusterSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.results.tables import Budget
from trainspec_cli.recipe.rules.run import forget_out_of_range
from trainspec_cli.reporter.plan.labels import PlanReport
from trainspec_cli.session.planning.plan import plan_recipe, require_fit

SUFFIXES = (".yaml", ".yml")
SAME = ("accelerator", "cost", "site", "power")
"""Sections of the cluster configuration that must be the same for all runs of a portfolio, because they share
machines."""


@dataclass(frozen=True)
class PortfolioEntry:
    """One kind of run."""

    plan: str
    """The arguments for `trainspec plan`: `recipe=llama3_8b cluster=h100 cluster.num_nodes=16`."""
    per_year: tuple[NonNegativeFloat, ...] = (1.0,)
    """Number of runs in the first year, the second year, and so on. The last number applies to all later years."""
    name: str = ""
    """Name in the budget; if empty, the name of the recipe is used."""


@dataclass(frozen=True)
class Portfolio:
    """Runs that share machines, and the period that the budget covers."""

    runs: tuple[PortfolioEntry, ...]
    years: Annotated[int, Range(1, 30)] = 4
    """Number of years that the budget covers."""


def budget_portfolio(arguments: Sequence[str], per_year: float = 1.0, years: int = 4) -> Budget:
    """Budget a file of runs (`portfolio.yaml key=value ...`), or one recipe that runs `per_year` times per year for
    `years` years.

    Raises RecipeError for mistakes and missing prices, and PlanError if a run does not fit."""
    first, *others = arguments or ("",)
    if first.endswith(SUFFIXES) and "=" not in first:
        file = Path(first)
        if not exists(file):
            raise RecipeError(Problem("missing_file", f"no such file: {file}", file=str(file)))
        read = read_yaml(file, Path.cwd())
        portfolio, problems = build(Portfolio, read.values())
        if not problems:
            problems = _out_of_range(portfolio)
        if not problems and not portfolio.runs:
            hint = "specify at least one: {plan: recipe=llama3_8b, per_year: [2]}"
            problems = [Problem("missing_value", "`runs` is empty", "runs", hint)]
        if problems:
            raise RecipeError(locate(problems, read.origins, (), Path.cwd()))
        entries = [(entry, [*entry.plan.split(), *others]) for entry in portfolio.runs]
    else:
        portfolio, problems = build(Portfolio, {"runs": [{"plan": "", "per_year": [per_year]}], "years": years})
        problems += _out_of_range(portfolio)
        if problems:
            raise RecipeError([_as_option(problem) for problem in problems])
        entries = [(portfolio.runs[0], list(arguments))]
    planned = [(entry, plan_recipe(each)) for entry, each in entries]
    for _, plan in planned:
        require_fit(plan)
    clusters = [plan.spec.cluster for _, plan in planned]
    plans = [entry.plan for entry, _ in entries]
    unlike = []
    for cluster, asked in zip(clusters[1:], plans[1:], strict=True):
        for part in SAME:
            if getattr(cluster, part) != getattr(clusters[0], part):
                message = f"`{asked}` shares machines with the first run, but has a different `cluster.{part}`"
                unlike.append(Problem("conflict", message, f"cluster.{part}", "make one budget per kind of machine"))
    if problems := [*_prices(clusters[0]), *unlike]:
        raise RecipeError(problems)
    runs = [_portfolio_run(entry, plan) for entry, plan in planned]
    capacity = planned[0][1].capacity
    return make_budget(clusters[0], capacity.world_size // clusters[0].num_nodes, runs, portfolio.years)


def _out_of_range(portfolio: Portfolio) -> list[Problem]:
    lacking = [
        Problem("missing_value", f"`runs.{number}.per_year` is empty", f"runs.{number}.per_year", "such as [2, 4]")
        for number, entry in enumerate(portfolio.runs)
        if not entry.per_year
    ]
    return [*forget_out_of_range(portfolio)[1], *lacking]


def _as_option(problem: Problem) -> Problem:
    """Replace the file's keys in a message with the command-line options that set them."""
    name = "--years" if problem.path == "years" else "--per-year"
    return replace(problem, path="", message=problem.message.replace(f"`{problem.path}`", name))


def _prices(cluster: ClusterSpec) -> Iterator[Problem]:
    """Yield a problem for each missing price, and for clusters with several pools."""
    if cluster.pools:
        message = "a budget is for one kind of device, and `cluster.pools` has several"
        yield Problem("unsupported", message, "cluster.pools", "choose one cluster, such as cluster=h100")
        return
    chip = cluster.accelerator.name if cluster.accelerator else "the accelerator"
    if cluster.cost.device_price_usd is None:
        path = "cluster.cost.device_price_usd"
        hint = f"set {path}=<dollars per device with its share of node, network and storage>; cost=owned is for an H100"
        yield Problem("missing_value", f"the price of {chip} is unknown", path, hint)
    if not rental_price(cluster):
        path = "cluster.cost.price_usd_per_device_hour"
        yield Problem("missing_value", f"the hourly price of {chip} is unknown", path, f"set {path}=<dollars>")
    if not cluster.accelerator or not cluster.accelerator.tdp_w:
        path = "cluster.accelerator.tdp_w"
        yield Problem("missing_value", f"the power of {chip} is unknown", path, f"set {path}=<watts>")


def _portfolio_run(entry: PortfolioEntry, plan: PlanReport) -> PortfolioRun:
    run = plan.run
    best = require_fit(plan)
    assert run is not None and run.energy_joules is not None
    cluster = plan.spec.cluster
    spot = replace(plan.spec, cluster=replace(cluster, reliability=spot_reliability(cluster)))
    try:
        spot_wall_s = forecast_run(spot, plan.capacity, best).wall_time_s.value
    except RecipeError:  # spot nodes are reclaimed too often for the run to finish
        spot_wall_s = None
    return PortfolioRun(
        name=entry.name or plan.spec.model.name or plan.spec.model.family,
        per_year=entry.per_year,
        devices=plan.capacity.world_size,
        wall_s=run.wall_time_s.value,
        spot_wall_s=spot_wall_s,
        tokens=run.tokens,
        energy_joules=run.energy_joules.value,
    )
