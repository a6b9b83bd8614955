"""`trainspec schema [NAME]`: print the JSON Schemas of recipes (for editors) and of the files that trainspec writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.recipe.compose.folders import DISTURB, RECIPE, find_folders
from trainspec_cli.recipe.json_schema import group_schema, recipe_schema, sections_of_group
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.folder.file_schemas import FILE_SCHEMAS
from trainspec_cli.run.folder.files import write_json


def schema(
    group: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"A folder of conf, such as optim, or a file that trainspec writes: {', '.join(FILE_SCHEMAS)}; the "
            "default is the schema of a recipe.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            "--write", metavar="FOLDER", help="Write recipe.json, and NAME.json for every other schema, to this folder."
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a recipe, of the files in a folder of conf, or of a file that trainspec writes.

    An editor with yaml-language-server uses the schema named in a comment in the file:

    # yaml-language-server: $schema=../conf/schema/recipe.json
    """
    groups = find_folders(Path.cwd()).groups
    # A group and a file may have the same name; each schema is listed only once.
    names = list(dict.fromkeys([RECIPE, *filter(sections_of_group, groups), DISTURB, *FILE_SCHEMAS]))
    if group is not None and group not in names:
        near = closest(group, names)
        hint = f"run trainspec schema {near}" if near else f"available schemas: {', '.join(names)}"
        raise RecipeError(Problem("unknown_group", f"there is no schema named `{group}`", hint=hint))
    if write is None:
        print(json_text(_schema_of(group or RECIPE, groups)))
        return
    for name in [group] if group else names:
        print(f"wrote {_write(write / f'{name}.json', _schema_of(name, groups))}")


def _schema_of(name: str, groups: Sequence[str]) -> JsonObject:
    if name == DISTURB:
        from trainspec_cli.session.planning.disturbance import disturbance_schema  # loads the planner

        return disturbance_schema()
    if name in FILE_SCHEMAS and name not in groups:
        return FILE_SCHEMAS[name]()
    return recipe_schema(groups) if name == RECIPE else group_schema(name, groups)


def _write(file: Path, content: JsonObject) -> Path:
    try:
        write_json(file, content)
    except OSError as error:
        hint = "choose a writable folder"
        raise RecipeError(
            Problem("output_exists", f"{file} cannot be written: {error.strerror}", "--write", hint)
        ) from error
    return file
