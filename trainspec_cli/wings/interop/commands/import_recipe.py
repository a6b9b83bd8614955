"""`trainspec import FILE`: read another engine's configuration as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.wings.interop import READERS
from trainspec_cli.wings.interop.import_recipe import import_file, write_recipe

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="The JSON, YAML, Python module or script of another engine.")
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the recipe to this file (default: print it).")]
From = Annotated[
    str, typer.Option("--from", metavar="ENGINE", help=f"One of {', '.join(READERS)} (default: by file name).")
]


def import_recipe(file: File, output: Output = None, engine: From = "", as_json: AsJson = False) -> None:
    """Read the configuration of an existing run as a recipe, so that trainspec can plan it.

    Reads DeepSpeed's JSON, the YAML of Accelerate, axolotl and MaxText, modules of torchtitan or Megatron-Bridge
    (parsed, not run), and Megatron-LM's arguments in a shell script. The recipe leaves open everything that the file
    does not contain: specify model=NAME, cluster=NAME and so on."""
    imported = import_file(file, engine)
    if output:
        write_recipe(imported, output)
    if as_json:
        content = imported.content
        parts = {"values": content.values, "unread": content.unread, "missing": list(imported.missing)}
        print(json_text({"engine": imported.target.name, **parts}))
        return
    if not output:
        print(imported.recipe, end="")
        return
    content = imported.content
    print(f"{output}: {len(content.values)} keys of {imported.target.title}, {len(content.unread)} not read")
    for key, why in content.unread.items():
        print(f"not read  {key}: {why}")
    missing = " ".join(f"{key}=..." for key in imported.missing)
    print(f"next: trainspec plan recipe={output} {missing}".rstrip())
