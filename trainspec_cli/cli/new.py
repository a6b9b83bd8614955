"""`trainspec new KIND NAME`: write a commented file for a model, an accelerator, a cluster or a recipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError, did_you_mean
from trainspec_cli.recipe.compose.folders import RECIPE
from trainspec_cli.recipe.json_text import json_text


def new(
    kind: Annotated[str, typer.Argument(metavar="model|accelerator|cluster|recipe", help="What to describe.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the new option or recipe.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="key=value", help="Values; those that are missing are asked for on a terminal."),
    ] = None,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="OPTION|hf:FOLDER",
            help="Build on an existing option or recipe; or describe the model of a Hugging Face folder.",
            show_default=False,
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Write a commented file that describes your own model, accelerator, cluster or recipe, below ./conf or ./recipes.

    An existing file is never changed.
    """
    from trainspec_cli.session.recipe.new import (
        KINDS,
        check_recipe,
        new_file,
    )  # loads hydra, which --help does not need

    if kind not in KINDS:
        hint = did_you_mean(kind, KINDS) or f"one of {', '.join(KINDS)}"
        raise RecipeError(Problem("wrong_choice", f"`{kind}` cannot be described", "", hint))
    ask = _ask if sys.stdin.isatty() and not as_json else None
    path, then = new_file(kind, name, arguments or [], source, ask)
    print(json_text({"file": str(path), "then": then}) if as_json else f"wrote {path}\nuse it: {then}")
    if kind == RECIPE:  # written all the same, so that it can be edited
        check_recipe(path)


def _ask(key: str, meaning: str) -> str:
    return str(typer.prompt(f"{key} ({meaning})"))
