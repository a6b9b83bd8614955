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
NumNodes = Annotated[
    int | None, typer.Option("--nnodes", metavar="N", help="Hosts of the run; the same command is given on each.")
]
NodeRank = Annotated[int, typer.Option("--node-rank", metavar="I", help="Which of them this is, from 0.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", metavar="HOST:PORT", help="The first host, as the others reach it, and a free port."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Force = Annotated[bool, typer.Option("--force", help="Train although the plan is predicted not to fit this machine.")]
