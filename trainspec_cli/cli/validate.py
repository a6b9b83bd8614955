"""`trainspec validate`: find every problem of a recipe, here and now."""

from __future__ import annotations

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.reporter.problems import render_json
from trainspec_cli.session.recipe.data import check_data
from trainspec_cli.session.recipe.load import Loaded, examine, machine_of_draft, plan_on, require
from trainspec_cli.spec.own_code import describe_code
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.rules.check import check_machine
from trainspec_cli.units import format_count


def validate(arguments: RecipeArguments, as_json: AsJson = False) -> None:
    """Find every problem of a recipe at once: keys, types, sizes that do not divide, files and GPUs that lack.

    Of the data the first 16 MiB are read.
    """
    examined = examine(arguments)
    machine = machine_of_draft(examined.draft)
    lacking = check_machine(examined.draft, machine) if machine else []
    require([*examined.problems, *examined.composed.locate(lacking)])
    assert machine is not None, "a recipe without problems says what device it wants"
    loaded = Loaded(examined.draft, examined.composed)
    plan = plan_on(loaded, machine)
    about_data = check_data(loaded)
    summary = _summary(examined.composed.recipe, plan)
    code = [f"\n{line}" for line in describe_code(examined.draft)]
    print(render_json([]) if as_json else "; ".join(filter(None, (summary, about_data))) + "".join(code))


def _summary(recipe: str, plan: Plan) -> str:
    spec = plan.spec
    units = format_count(spec.train.max_steps * plan.tokens_per_step)
    length = f" x {spec.data.seq_len} tokens" if spec.data.unit == "tokens" else " samples"
    first = "" if spec.batching.schedule.kind == "constant" else " at first"
    return (
        f"{recipe} is valid: {spec.model.name or spec.model.family}, {format_count(plan.params)} parameters, "
        f"{plan.total_steps} steps of {spec.batching.global_batch_size}{length}{first} "
        f"({units} in all), {plan.world_size} x {plan.device} in {plan.compute}"
    )
