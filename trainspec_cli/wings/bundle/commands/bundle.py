"""`trainspec bundle`: create a folder for installing trainspec and training offline."""

from __future__ import annotations

import hashlib
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, check_new, not_empty
from trainspec_cli.core.errors import MachineError, Problem, RecipeError
from trainspec_cli.core.printable import format_bytes
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.records import to_plain
from trainspec_cli.reporter.console import PrintableConsole
from trainspec_cli.reporter.live import showing_progress
from trainspec_cli.session.recipe.load import load
from trainspec_cli.wings.bundle import (
    INSTALLER,
    RECORD,
    WHEELS,
    BundleRecord,
    WantedBundle,
    WantedRecipe,
    check_target,
    examine,
    make_bundle,
    platform_here,
    python_here,
    read_bundle,
)

Out = Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create or check.", show_default=False)]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[recipe=NAME key=value...]...",
        help="Recipes to include with their data, tokenizer and weights; key=value changes the recipe before it.",
        show_default=False,
    ),
]
Platforms = Annotated[
    list[str] | None,
    typer.Option(
        "--platform",
        help="Platform of the target machines, such as manylinux_2_28_x86_64 (for glibc 2.28). Repeatable.",
        show_default="this machine's",
    ),
]
Python = Annotated[
    str | None,
    typer.Option(help="Python version of the target machines, such as 3.12.", show_default="this one's version"),
]
Extras = Annotated[
    list[str] | None, typer.Option("--extra", help="Optional dependency group (extra) of trainspec. Repeatable.")
]
Wheels = Annotated[
    Path | None,
    typer.Option(help="Use only wheels from this folder.", show_default=False),
]
Check = Annotated[bool, typer.Option("--check", help="Only check an existing bundle's files against their digests.")]


def bundle(
    out: Out,
    arguments: Arguments = None,
    platform: Platforms = None,
    python: Python = None,
    extra: Extras = None,
    wheels: Wheels = None,
    check: Check = False,
    as_json: AsJson = False,
) -> None:
    """Create a folder for installing trainspec and training without a network: wheels, recipes, data and digests. pip
    downloads the wheels according to its own settings.
    """
    if check:
        given = {"a recipe": arguments, "--platform": platform, "--extra": extra, "--wheels": wheels}
        for name in (name for name, value in given.items() if value):
            message = f"--check cannot be combined with {name}, because it checks an existing bundle"
            raise RecipeError(Problem("contradiction", message, "--check", "run trainspec bundle OUT --check"))
        if faults := examine(out):
            raise MachineError([Problem(one.code, one.message, hint=one.hint, environment=True) for one in faults])
        record = read_bundle(out)
        if as_json:
            print(json_text({"path": str(out), **to_plain(record)}))
        else:
            print(f"{out} is complete: {_describe(record)}")
        return
    targets = tuple(check_target(python or python_here(), name) for name in platform or [platform_here()])
    if wheels is not None and not wheels.is_dir():
        raise RecipeError(
            Problem("missing_file", f"--wheels {wheels} is not a folder", "--wheels", "specify a folder with wheels")
        )
    check_new(out)
    recipes = tuple(_load_recipes(arguments or []))
    command = shlex.join(["trainspec", *sys.argv[1:]])
    wanted = WantedBundle(targets, tuple(extra or ()), recipes, wheels, command)
    try:
        with showing_progress(PrintableConsole(stderr=True)) as on_progress:
            record, notes = make_bundle(out, wanted, on_progress)
    except FileExistsError as error:
        raise not_empty(out) from error
    made = out.expanduser().resolve()
    digest = hashlib.sha256((made / RECORD).read_bytes()).hexdigest()
    if as_json:
        print(json_text({"path": str(made), "sha256": digest, "notes": list(notes), **to_plain(record)}))
        return
    print(f"{made}: {_describe(record)}")
    for note in notes:
        print(f"not included {note}")
    print(f"{RECORD}  sha256 {digest}")
    print(f"install it   python{record.python} {INSTALLER} VENV, in a copy of the folder")


def _load_recipes(arguments: Sequence[str]) -> Iterator[WantedRecipe]:
    """Yield the recipes. Raises RecipeError for a key=value before the first recipe or for a repeated name, and the
    same errors as `load`."""
    groups: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in arguments:
        key, _, name = word.partition("=")
        if key == "recipe":
            if name in groups:
                raise RecipeError(Problem("contradiction", f"{word} is specified twice", "recipe", "give it once"))
            current = groups[name] = []
        elif current is None:
            message = f"{word} must follow the recipe=NAME that it changes"
            raise RecipeError(Problem("usage", message, hint=f"run trainspec bundle OUT recipe=NAME {word}"))
        current.append(word)
    for name, words in groups.items():
        yield WantedRecipe(name, tuple(words), load(words).spec)


def _describe(record: BundleRecord) -> str:
    platforms = " and ".join(record.platforms)
    num_wheels = sum(name.startswith(f"{WHEELS}/") for name in record.files)
    what = f"trainspec {record.version} for {platforms} with Python {record.python}"
    return f"{what}, {num_wheels} wheels, {len(record.files)} files, {format_bytes(record.total_bytes)}"
