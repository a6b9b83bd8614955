"""`trainspec import FILE`: another engine's configuration as a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.wings.interop import READERS
from trainspec_cli.wings.interop.import_recipe import import_file, write_recipe

File = Annotated[
    Path, typer.Argument(metavar="FILE", help="A JSON, a YAML, a Python module, or a script of another engine.")
]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="The recipe to write; without it, it is printed.")]
From = Annotated[
    str, typer.Option("--from", metavar="ENGINE", help=f"One of {', '.join(READERS)}; else by the ending.")
]


def import_recipe(file: File, output: Output = None, engine: From = "", as_json: AsJson = False) -> None:
    """Read the configuration of a run that you have, so that trainspec plan answers for it.

    Reads the JSON of DeepSpeed, the YAML of Accelerate, axolotl and MaxText, a module of torchtitan or Megatron-Bridge
    (parsed, not run), and the arguments of Megatron-LM in a shell script. What the file does not say is asked for:
    model=NAME, cluster=NAME and so on.
    """
    imported = import_file(file, engine)
    if output:
        write_recipe(imported, output)
    if as_json:
        heard = imported.heard
        parts = {"values": heard.values, "unread": heard.unread, "missing": list(imported.missing)}
        print(json_text({"engine": imported.target.name, **parts}))
        return
    if not output:
        print(imported.recipe, end="")
        return
    print(
        f"{output}: {len(imported.heard.values)} keys of {imported.target.title}, {len(imported.heard.unread)} not read"
    )
    for key, why in imported.heard.unread.items():
        print(f"not read  {key}: {why}")
    missing = " ".join(f"{key}=..." for key in imported.missing)
    print(f"next: trainspec plan recipe={output} {missing}".rstrip())
