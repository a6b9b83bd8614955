"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

RecipeArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME|key=value",
        help="The recipe, and what to change of it: optim.lr=3e-4, model=llama_6m, ~key to take one out.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Force = Annotated[bool, typer.Option("--force", help="Train although the plan is predicted not to fit this machine.")]
