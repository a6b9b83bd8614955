"""`trainspec plan`: how a run should be laid out, whether it fits, how long it takes and what it costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import RenderableType

from trainspec_cli.cli.options import AsJson, RecipeArguments, read_sweep
from trainspec_cli.errors import PlanError, Problem, RecipeError, TrainspecError
from trainspec_cli.launch.measuring import trace_plan
from trainspec_cli.planner.capacity import accelerator_of, blueprint_of
from trainspec_cli.planner.memory.engine import tensors_by_cause
from trainspec_cli.planner.planes.plan import plan_planes
from trainspec_cli.planner.run.forecast import forecast_run
from trainspec_cli.planner.search.auto import as_plan, is_run
from trainspec_cli.planner.search.variants import in_replica_groups, plan_on_what_divides
from trainspec_cli.report.plan.json import plan_as_json, sweep_as_json
from trainspec_cli.report.plan.page import render_plan_page, render_sweep_page
from trainspec_cli.report.plan.text import render_plan, render_sweep
from trainspec_cli.report.plan.trace import trace_as_json
from trainspec_cli.session.console import PrintableConsole
from trainspec_cli.session.disturbance import load_disturbance, simulate_disturbed
from trainspec_cli.session.load import load_for_planning, this_machine
from trainspec_cli.session.sweep import sweep_arguments
from trainspec_cli.spec.canonical import to_plain
from trainspec_cli.spec.json_text import json_text
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import CapacityPlan
from trainspec_cli.spec.rules.engine import check_built

Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write one page with charts.")]
Sweeps = Annotated[
    list[str] | None,
    typer.Option(
        "--sweep",
        metavar="KEY=A,B,...",
        help="Plan for each value, such as cluster.num_nodes=1,2,4,8; of several, for each combination.",
    ),
]

Trace = Annotated[
    bool, typer.Option(help="Also run the engine's own step under fake tensors, and hold the plan against it.")
]

PIPED_WIDTH = 150
"""Columns where there is no terminal to ask."""


def plan(
    arguments: RecipeArguments, as_json: AsJson = False, html: Html = None, sweep: Sweeps = None, trace: Trace = False
) -> None:
    """Rank the layouts of a recipe on a cluster, and forecast the run: time, goodput, energy, carbon, money.

    Needs no GPU and starts nothing. Exit code 3 means that nothing fits; the output lists what would. With
    disturb=NAME|FILE the run is also simulated under a disturbance: its speed with the scheduler and without it.
    """
    if not sweep:
        _plan_one(arguments, as_json, html, trace)
    elif trace:
        raise RecipeError(Problem("usage", "--trace takes one plan, and --sweep makes many", hint="leave one out"))
    elif load_disturbance(arguments):
        raise RecipeError(Problem("usage", "disturb= takes one plan, and --sweep makes many", hint="leave one out"))
    else:
        _plan_many(arguments, sweep, as_json, html)


def _plan_one(arguments: Sequence[str], as_json: bool, html: Path | None, trace: bool) -> None:
    planned = _plan(arguments, trace=trace)
    if html:
        _write_page(html, render_plan_page(planned))
    _show(planned, as_json, lambda width: render_plan(planned, width))
    if not planned["best"]:
        _refuse(planned, as_json)


def _plan_many(arguments: Sequence[str], sweeps: Sequence[str], as_json: bool, html: Path | None) -> None:
    read = [read_sweep(sweep) for sweep in sweeps]
    swept = sweep_as_json(
        [key for key, _ in read], [(values, _plan(point)) for values, point in sweep_arguments(arguments, read)]
    )
    if html:
        _write_page(html, render_sweep_page(swept))
    _show(swept, as_json, lambda width: render_sweep(swept))
    if not any(point["plan"]["best"] for point in swept["points"]):
        _refuse(swept["points"][-1]["plan"], as_json)


def _plan(arguments: Sequence[str], *, trace: bool = False) -> dict[str, Any]:
    loaded, disturbed = load_for_planning(arguments), load_disturbance(arguments)
    spec, machine = _on_machine(loaded.spec)
    try:
        spec, capacity = plan_on_what_divides(spec, machine)
    except TrainspecError as error:
        raise type(error)(loaded.composed.locate(error.problems)) from error
    best = capacity.best
    run = forecast_run(spec, capacity, best, in_replica_groups(spec, machine, best)) if best else None
    planned = plan_as_json(spec, capacity, run)
    if best and capacity.world_size > 1:
        planned["blueprint"] = to_plain(blueprint_of(best, spec, machine))
    if planes := plan_planes(spec.cluster, capacity.world_size):
        planned["planes"] = to_plain(planes)
    if disturbed and best:
        planned["simulation"] = to_plain(simulate_disturbed(disturbed, spec, best, machine))
    return planned | {"trace": _trace(spec, capacity)} if trace and capacity.candidates else planned


def _trace(spec: RunSpec, capacity: CapacityPlan) -> dict[str, Any]:
    """Trace the fastest candidate that the engine runs. Raises PlanError where it runs none of those shown."""
    candidate = next((candidate for candidate in capacity.candidates if is_run(candidate, spec)), None)
    if candidate is None:
        reasons = "; ".join(dict.fromkeys(problem.message for problem in check_built(spec)))
        got = f"the engine builds none of the layouts that are shown, so none can be traced{reasons and ': '}{reasons}"
        raise PlanError(Problem("unsupported", got, hint="pin a layout, such as layout.tp=1 layout.pp=1"))
    compute: Literal["bf16", "fp32"] = "fp32" if spec.precision.compute == "fp32" else "bf16"
    traced = as_plan(spec, candidate, capacity, compute)
    return trace_as_json(candidate, capacity, trace_plan(traced), tensors_by_cause(traced))


def _on_machine(spec: RunSpec) -> tuple[RunSpec, Machine | None]:
    """A cluster that names no accelerator is this machine."""
    if spec.cluster.accelerator is not None:
        return spec, None
    machine = this_machine(spec)
    return replace(spec, cluster=replace(spec.cluster, accelerator=accelerator_of(machine))), machine


def _write_page(file: Path, page: str) -> None:
    try:
        file.write_text(page, encoding="utf-8")
    except OSError as error:
        message = f"--html {file} cannot be written: {error.strerror}"
        hint = "choose a file in a folder that is there"
        raise RecipeError(Problem(code="output_exists", message=message, hint=hint)) from error


def _show(result: Any, as_json: bool, render: Callable[[int], RenderableType]) -> None:
    if as_json:
        print(json_text(result))
        return
    console = PrintableConsole(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
    console.show(render(console.width))


def _refuse(planned: dict[str, Any], as_json: bool) -> None:
    """Refuse a plan without a best layout; with `--json` the plan itself is the answer."""
    if as_json:
        raise typer.Exit(PlanError.exit_code)
    devices = f"{planned['cluster']['world_size']:,} {planned['cluster']['accelerator']}"
    message = f"no layout of {planned['model']['name'] or 'the model'} fits on {devices}"
    raise PlanError(Problem(code="does_not_fit", message=message, hint="; ".join(planned["advice"])))
