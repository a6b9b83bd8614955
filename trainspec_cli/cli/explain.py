"""`trainspec explain KEY`: print the meaning and the allowed values of a recipe key."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.intentions import closest, closest_path, hint_for
from trainspec_cli.recipe.compose.folders import NAMED_SECTIONS, find_folders
from trainspec_cli.recipe.json_schema import KeyMeaning, path_of_group
from trainspec_cli.recipe.json_schema import explain as explain_key
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import known_paths, only_key_named

WIDTH = 100


def explain(
    key: Annotated[
        str, typer.Argument(metavar="KEY", help="A dotted key, such as optim.lr or slurm.time, or a section.")
    ],
    as_json: AsJson = False,
) -> None:
    """Print the meaning of a recipe key, with its unit, allowed values and default."""
    folders = find_folders(Path.cwd())
    options = folders.options(NAMED_SECTIONS.get(key, key))
    # Complete a key that starts with the name of a group, such as `slurm.time` for `cluster.slurm.time`, or that is the
    # unique last word of a key, such as `lr` for `optim.lr`.
    first, dot, rest = key.partition(".")
    # A key takes precedence over a group of the same name, such as `data`.
    is_group = first in folders.groups and not any(explain_key(RunSpec, first))
    section = path_of_group(first) if is_group else ""
    if section:
        path = f"{section}{dot}{rest}"
    else:
        path = key if any(explain_key(RunSpec, key)) else only_key_named(key) or key
    found = list(explain_key(RunSpec, path))
    if not found:
        if foreign := hint_for(path.rpartition(".")[2]):
            hint = foreign
        else:
            known = list(dict.fromkeys(known_paths(RunSpec)))
            same = [other for other in known if other.rpartition(".")[2] == path]
            if len(same) > 1:
                hint = f"several sections have this key; run trainspec explain {', or '.join(same)}"
            else:
                near = closest_path(path, known) or closest(path, known)
                hint = (
                    f"run trainspec explain {near}" if near else "trainspec show recipe=NAME lists the keys of a recipe"
                )
        raise RecipeError(Problem("unknown_key", f"recipes have no key `{key}`", key, hint))
    if as_json:
        print(json_text({"key": key, "options": options, "meanings": [asdict(one) for one in found]}))
        return
    print("\n\n".join(dict.fromkeys(_text(one, several=len({other.doc for other in found}) > 1) for one in found)))
    if options:
        print(_line("options", ", ".join(options)))


def _text(found: KeyMeaning, *, several: bool) -> str:
    rows = {
        "meaning": " ".join(found.doc.split()),
        "unit": found.unit,
        "value": found.value,
        "default": "none: a value is required" if found.default is None else found.default,
        "keys": ", ".join(found.below),
    }
    title = f"{found.key} ({found.of})" if several else found.key
    return "\n".join([title, *(_line(name, text) for name, text in rows.items() if text)])


def _line(name: str, text: str) -> str:
    return fill(text, WIDTH, initial_indent=f"  {name:<9}", subsequent_indent=" " * 11, break_on_hyphens=False)
