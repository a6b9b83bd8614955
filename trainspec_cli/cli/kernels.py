"""`trainspec kernels`: measure which kernels are fastest on this machine, with a recipe's shapes."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.console import make_console
from trainspec_cli.reporter.kernels_text import render_table
from trainspec_cli.run.signals import interrupt, on_stop_signal
from trainspec_cli.run.tools import measure_kernels
from trainspec_cli.session.recipe.load import load, plan_on, this_machine

Again = Annotated[bool, typer.Option("--again", help="Measure again, even if results exist.")]


def kernels(arguments: RecipeArguments, again: Again = False, as_json: AsJson = False) -> None:
    """Measure every kernel that runs on this machine with the recipe's shapes: its error against fp64, and its speed
    against torch's default. kernels=auto uses the results. Each kernel is measured only once."""
    console = make_console(as_json=as_json)
    with on_stop_signal(interrupt):
        loaded = load(arguments)
        machine = this_machine(loaded.spec)
        plan = plan_on(loaded, machine)
        begin = partial(console.report, "measuring kernels on this machine, once")
        table = measure_kernels(plan, machine, begin, again=again)
    if as_json:
        print(json_text(to_plain(table)))
    else:
        console.print(render_table(table))
