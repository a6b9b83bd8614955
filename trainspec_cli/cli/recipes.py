"""`trainspec recipes`: what there is to run."""

from __future__ import annotations

import sys
from pathlib import Path

from trainspec_cli.cli.list import RECIPE, options_of
from trainspec_cli.cli.options import AsJson
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.report.style import Style


def recipes(as_json: AsJson = False) -> None:
    """List the recipes with their files: your own in ./recipes first, then those that ship."""
    cwd = Path.cwd().resolve()
    listed = options_of(RECIPE, find_folders(cwd), cwd)
    found = [{**recipe, "description": recipe["description"] or "(no description)"} for recipe in listed]
    if as_json:
        print(json_text(found))
        return
    style = Style.of(sys.stdout)
    width = max(len(str(recipe["name"])) for recipe in found)
    for recipe in found:
        print(f"{style.bold(str(recipe['name']).ljust(width))}  {recipe['description']}")
        print(f"{' ' * width}  {style.dim(str(recipe['file']))}")
