"""`trainspec recipes`: what there is to run."""

from __future__ import annotations

import sys
from pathlib import Path

from trainspec_cli.cli.options import AsJson
from trainspec_cli.composer.folders import find_folders
from trainspec_cli.composer.origins import show_path
from trainspec_cli.composer.yaml_file import read_yaml
from trainspec_cli.errors import RecipeError
from trainspec_cli.reporter.style import Style
from trainspec_cli.spec.json_text import json_text


def recipes(as_json: AsJson = False) -> None:
    """List the recipes there are: your own in ./recipes first, then those that ship."""
    found = _find()
    if as_json:
        print(json_text(found))
        return
    style = Style.of(sys.stdout)
    width = max(len(recipe["name"]) for recipe in found)
    for recipe in found:
        print(f"{style.bold(recipe['name'].ljust(width))}  {recipe['description']}")
        print(f"{' ' * width}  {style.dim(recipe['file'])}")


def _find() -> list[dict[str, str]]:
    cwd = Path.cwd().resolve()
    folders = find_folders(cwd)
    files = {name: folders.find_config(f"recipe/{name}") for name in folders.recipe_names()}
    own = [name for name, file in files.items() if file and file.is_relative_to(cwd / "recipes")]
    shipped = [name for name in files if name not in own]
    return [
        {"name": name, "description": _describe(file, cwd), "file": show_path(file, cwd)}
        for name in (*own, *shipped)
        if (file := files[name])
    ]


def _describe(file: Path, cwd: Path) -> str:
    """Its description, or what keeps it from being read."""
    try:
        return read_yaml(file, cwd).description or "(no description)"
    except RecipeError as error:
        problem = error.problems[0]
        return f"(cannot be read: {problem.where()}: {problem.message})"
