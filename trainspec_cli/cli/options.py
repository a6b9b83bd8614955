"""Arguments and options that several commands share."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.errors import Problem, RecipeError

RecipeArguments = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME|key=value",
        help="The recipe, and what to change of it: optim.lr=3e-4, model=llama_6m, ~key to take one out.",
        show_default=False,
    ),
]
NumNodes = Annotated[
    int | None, typer.Option("--nnodes", metavar="N", help="Nodes of the run; the same command is given on each.")
]
NodeRank = Annotated[int, typer.Option("--node-rank", metavar="I", help="Which of them this is, from 0.")]
Endpoint = Annotated[
    str | None,
    typer.Option(
        "--rdzv-endpoint", metavar="HOST:PORT", help="The first node, as the others reach it, and a free port."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Force = Annotated[bool, typer.Option("--force", help="Train although the plan is predicted not to fit this machine.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, or `last` for the newest below ./runs.")
]


def check_new(output: Path) -> None:
    """Raise RecipeError for an output folder that holds something."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise not_empty(output)


def not_empty(output: Path) -> RecipeError:
    hint = f"choose another folder, or remove it first: rm -r {shlex.quote(str(output))}"
    return RecipeError(Problem("output_exists", f"{output} exists and is not empty", "--output", hint))


def read_sweep(sweep: str) -> tuple[str, list[str]]:
    """Return the key and the values of a sweep. Raises RecipeError."""
    key, _, text = sweep.partition("=")
    values = [value for value in text.split(",") if value]
    if not key or not values:
        message = f"--sweep is `{sweep}`; a key and its values are needed"
        raise RecipeError(Problem("usage", message, hint="such as --sweep cluster.num_nodes=1,2,4,8"))
    return key, values
