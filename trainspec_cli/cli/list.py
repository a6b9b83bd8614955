"""`trainspec list`: list the options of every group, and the recipes. Files in ./conf and ./recipes come first."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.json_value import JsonObject, JsonValue
from trainspec_cli.core.printable import Style, aligned, format_count
from trainspec_cli.core.reading.files import UnreadableFileError, read_text
from trainspec_cli.planner.hardware.rates import build_accelerator, load_group, models
from trainspec_cli.planner.workload import count_active_params, count_params
from trainspec_cli.recipe.compose.folders import DISTURB, SECTION_NAMED_BY, Folders, find_folders, read_yaml, show_path
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.model import OwnModel

Row = JsonObject
RECIPE = "recipe"
_FOR_PROGRAMS = re.compile(r"#\s*(@package|yaml-language-server)\b")
"""Prefixes of comments at the top of a file that are meant for Hydra or editors, not for people."""


def options_of(group: str, folders: Folders, cwd: Path) -> Sequence[Row]:
    """Return the options of a group with description and file; the user's files come first."""
    names = folders.recipe_names() if group == RECIPE else folders.options(group)
    files = {name: folders.find_config(f"{group}/{name}") for name in names}
    rows: Sequence[Row] = [
        {"name": name, "description": _describe(file, cwd), "file": show_path(file, cwd)}
        for name, file in files.items()
        if file
    ]
    # A user's file hides the shipped file of the same name, as it does when a recipe is composed.
    shipped = {name for name, file in files.items() if file and not file.is_relative_to(cwd)}
    return sorted(rows, key=lambda row: (row["name"] in shipped, str(row["name"])))


def _describe(file: Path, cwd: Path) -> str:
    """Return a file's description: the first sentence of the comment at its top, or the name stated in it. If it cannot
    be read, return the reason."""
    try:
        content = read_yaml(file, cwd)
        lines = read_text(file).splitlines()
    except (RecipeError, UnreadableFileError) as error:
        problem = error.problems[0]
        return f"(cannot be read: {problem.where()}: {problem.message})"
    comment = [
        line.lstrip("# ")
        for line in takewhile(lambda line: line.startswith("#"), lines)
        if not _FOR_PROGRAMS.match(line)
    ]
    sentence = re.split(r"(?<=[.;:]) ", " ".join(comment), maxsplit=1)[0].strip(".;: ")
    name = content.values().get("name")
    return content.description or sentence or (name if isinstance(name, str) and name != file.stem else "")


# Key values of the options in three groups


def _accelerator(values: JsonObject) -> Row:
    keys = ("bf16_tflops", "memory_gb", "memory_tb_per_s", "link_gb_per_s", "tdp_w", "price_usd_per_hour")
    build_accelerator(values)  # an invalid file raises an error here, and its values are omitted
    return {"label": values.get("name"), **{key: values.get(key) for key in keys}}


def _cluster(values: JsonObject) -> Row:
    defaults = values.get("defaults")
    entries = [entry for entry in defaults if isinstance(entry, dict)] if isinstance(defaults, Sequence) else []
    chosen = [str(value) for entry in entries for key, value in entry.items() if "accelerator" in str(key)]
    keys = ("devices_per_node", "scaleup_devices", "nic_gbit_per_s")
    return {"accelerator": next(iter(chosen), None), **{key: values.get(key) for key in keys}}


def _models() -> dict[str, Row]:
    found: dict[str, Row] = {}
    for name, model in models().items():
        sizes: Row = {"parameters": None, "active_parameters": None}
        if not isinstance(model, OwnModel) or model.block_params:
            sizes = {"parameters": count_params(model), "active_parameters": count_active_params(model)}
        found[name] = {"family": model.family, **sizes}
    return found


FIGURES: dict[str, Callable[[], dict[str, Row]]] = {
    "accelerator": lambda: load_group("accelerator", _accelerator),
    "cluster": lambda: load_group("cluster", _cluster),
    "model": _models,
}
"""Maps a group to the function that returns an option's key values."""


def list(
    group: Annotated[
        str | None, typer.Argument(metavar="GROUP", help="List only this group, with key values.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the recipes and the options of every group of a recipe; your own files come first."""
    cwd = Path.cwd().resolve()
    folders = find_folders(cwd)
    groups = (RECIPE, *folders.groups, DISTURB)
    if group is not None:
        group = group if group in groups else group.removesuffix("s")
        if group not in groups:
            near = closest(group, groups)
            hint = f"run trainspec list {near}" if near else f"groups: {', '.join(groups)}"
            raise RecipeError(Problem("usage", f"there is no group `{group}`", hint=hint))
    style = Style.of(sys.stdout)
    wanted = [name for name in groups if group in (None, name)]
    found = {name: options_of(name, folders, cwd) for name in wanted}
    if as_json or group is not None:
        found = {name: _with_figures(name, rows) for name, rows in found.items()}
    if as_json:
        print(json_text(found))
    elif group == RECIPE:
        width = max((len(str(row["name"])) for row in found[RECIPE]), default=0)
        for row in found[RECIPE]:
            print(f"{style.bold(str(row['name']).ljust(width))}  {row['description'] or '(no description)'}")
            print(f"{' ' * width}  {style.dim(str(row['file']))}")
    elif group is not None:
        rows = found[group]
        headings = [heading for heading in rows[0] if heading not in ("description", "file")] if rows else []
        if group not in FIGURES:
            headings += ["description"]
        cells = [[heading if heading != "name" else group for heading in headings]]
        cells += [[_cell(heading, row[heading]) for heading in headings] for row in rows]
        numbers = [
            place for place, heading in enumerate(headings) if not any(isinstance(row[heading], str) for row in rows)
        ]
        head, *lines = aligned(cells, numbers)
        print("\n".join([style.bold(head), *lines]))
    else:
        print("\n\n".join("\n".join(_overview(name, rows)) for name, rows in found.items()))


def _with_figures(group: str, rows: Sequence[Row]) -> Sequence[Row]:
    if group not in FIGURES:
        return [*rows]
    figures = FIGURES[group]()
    columns = dict.fromkeys(column for row in figures.values() for column in row)
    return [{"name": row["name"], **dict.fromkeys(columns), **figures.get(str(row["name"]), {}), **row} for row in rows]


def _overview(group: str, rows: Sequence[Row]) -> Iterator[str]:
    style = Style.of(sys.stdout)
    yield f"{style.bold(group)}  {style.dim(f'{SECTION_NAMED_BY.get(group, group)}=NAME')}"
    width = max((len(str(row["name"])) for row in rows), default=0)
    for row in rows:
        yield f"  {str(row['name']).ljust(width)}  {row['description']}".rstrip()


def _cell(heading: str, value: JsonValue) -> str:
    if value is None:
        return "-"
    if heading.endswith("parameters") and isinstance(value, int):
        return format_count(value)
    return f"{value:g}" if isinstance(value, float) else str(value)
