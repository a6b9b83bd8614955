"""`trainspec validate`: find all problems in a recipe and, with --here, anything that is missing on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.core.printable import format_count, format_params
from trainspec_cli.recipe.keys.model import OwnModel
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules.check import apply, check_machine, packages
from trainspec_cli.recipe.user_code import describe_code
from trainspec_cli.reporter.problems import render_json
from trainspec_cli.session.recipe.data import check_data
from trainspec_cli.session.recipe.load import (
    Loaded,
    examine,
    machine_of_cluster,
    machine_of_draft,
    plan_for,
    require,
    this_machine,
    without_uncounted,
)

Here = Annotated[
    bool,
    typer.Option("--here", help="Check this machine too: its GPUs, packages and compiler, as a launch does."),
]


def validate(arguments: RecipeArguments, here: Here = False, as_json: AsJson = False) -> None:
    """Find all problems in a recipe: keys, types, sizes that do not divide evenly, missing files.

    The first 16 MiB of each data source are read. With --here, also report anything that is missing on this machine."""
    examined = examine(arguments)
    spec = examined.draft
    found = machine_of_draft(spec) if here else None
    lacking = (
        check_machine(spec, found)
        if found
        else [problem for problem in apply([packages], spec) if problem.path.startswith("data.")]
    )
    require([*without_uncounted(examined.problems), *examined.composed.locate(lacking)])
    loaded = Loaded(spec, examined.composed)
    machine = found or machine_of_cluster(spec.cluster) or this_machine(spec)
    # Without the GPU memory size, no layout can be checked; a launch on a node with GPUs checks it.
    is_open = spec.cluster.device == "cuda" and not machine.gpu_names
    plan = None if is_open else plan_for(loaded, machine)
    about_data = check_data(loaded)
    recipe = examined.composed.recipe
    summary = (
        _summary(recipe, plan) if plan else f"{recipe} is valid; its layout will be checked on a node with its GPUs"
    )
    code = [f"\n{line}" for line in describe_code(examined.draft)]
    print(render_json([]) if as_json else "; ".join(filter(None, (summary, about_data))) + "".join(code))


def _summary(recipe: str, plan: Plan) -> str:
    spec = plan.spec
    units = format_count(spec.train.max_steps * plan.tokens_per_step)
    length = f" x {spec.data.seq_len} tokens" if spec.data.unit == "tokens" else " samples"
    is_counted = not isinstance(spec.model, OwnModel) or spec.model.block_params
    counted = "" if is_counted else " and those of its blocks, which trainspec plan counts"
    first = "" if spec.batching.schedule.kind == "constant" else " at first"
    params = format_params(plan.params, plan.adapter_params)
    return (
        f"{recipe} is valid: {spec.model.name or spec.model.family}, {params}{counted}, "
        f"{plan.total_steps} steps of {spec.batching.global_batch_size}{length}{first} "
        f"({units} in total), {plan.world_size} x {plan.device} in {plan.compute}"
    )
