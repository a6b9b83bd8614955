"""`trainspec show`: print the composed recipe, or its differences from another recipe."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.json_value import JsonObject, flatten
from trainspec_cli.core.printable import Style, aligned
from trainspec_cli.core.reading.files import UnreadableFileError, exists, expand
from trainspec_cli.core.reading.yaml_file import read_versioned_yaml
from trainspec_cli.recipe.compose.folders import RECIPE
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.folder.paths import RunDir
from trainspec_cli.session.recipe.load import examine, require, without_uncounted

WIDEST_CELL = 40


def show(
    arguments: RecipeArguments,
    diff: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER", help="Show the differences from another recipe, a run folder or its composed.yaml."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the composed recipe, with the file:line of each value."""
    examined = examine(arguments)
    # Do not print a partial recipe as JSON, because a program would mistake it for a complete one. People can see where
    # the problems are.
    hopeless = without_uncounted(examined.problems) and (as_json or RECIPE in examined.composed.failed)
    if diff is None and not hopeless:
        from trainspec_cli.recipe.compose.values import render_yaml  # loads hydra, which the help does not need

        if not as_json:
            whole = render_yaml(examined.composed.data, examined.composed.origins, Style.of(sys.stdout).dim)
        else:
            origins = {
                path: vars(examined.composed.origins[path])
                for path in flatten(examined.composed.data)
                if path in examined.composed.origins
            }
            content = {"recipe": examined.composed.recipe, "values": examined.composed.data, "origins": origins}
            whole = json_text(content) + "\n"
        print(whole, end="")
    require(without_uncounted(examined.problems))
    if diff is not None:
        these = flatten(examined.composed.data)
        those = flatten(_compose_other(diff))
        differing = [path for path in {**these, **those} if these.get(path, _ABSENT) != those.get(path, _ABSENT)]
        if as_json:
            rows = [{"path": path, "this": these.get(path), "other": those.get(path)} for path in differing]
            difference = json_text({"recipe": examined.composed.recipe, "other": diff, "differences": rows})
        elif not differing:
            difference = f"{examined.composed.recipe} and {diff} do not differ"
        else:
            cells = [("", examined.composed.recipe, diff)]
            cells += [(path, _cell(these, path), _cell(those, path)) for path in differing]
            head, *lines = aligned(cells)
            difference = "\n".join([Style.of(sys.stdout).bold(head), *lines])
        print(difference)


def _compose_other(other: str) -> JsonObject:
    """Return the values in a run folder's composed.yaml, or the values of a recipe. Raises RecipeError."""
    path = expand(other)
    inside = RunDir(path).composed_yaml
    file = inside if exists(inside) else path
    if file.name == inside.name and exists(file):
        try:
            values = read_versioned_yaml(file)
        except UnreadableFileError as error:
            raise RecipeError(error.problems) from error
        if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
            raise RecipeError(f"{file} does not contain a composed recipe", code="bad_yaml")
        return values
    examined = examine([f"recipe={other}"])
    require(without_uncounted(examined.problems))
    return examined.composed.data


_ABSENT = object()


def _cell(values: JsonObject, path: str) -> str:
    from trainspec_cli.recipe.compose.values import render_value  # loads hydra, which the help does not need

    text = render_value(values[path]) if path in values else "-"
    return text if len(text) <= WIDEST_CELL else f"{text[: WIDEST_CELL - 3]}..."
