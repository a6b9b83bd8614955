"""`trainspec emit`: write a recipe's plan as the configuration of another engine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from trainspec_cli.cli.options import AsJson, RecipeArguments
from trainspec_cli.core.printable import Style
from trainspec_cli.core.reading.files import read_object
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.wings.interop import EMITTED, NOT_CARRIED, TARGETS, Container, show
from trainspec_cli.wings.interop.emit import Emission, emit_recipe, write_emission

For = Annotated[str, typer.Option("--for", metavar="ENGINE", help=f"One of {', '.join(TARGETS)}.")]
Output = Annotated[Path, typer.Option(metavar="DIR", help="Folder for the files.")]
Overwrite = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


Image = Annotated[str, typer.Option(metavar="NAME", help="Container image with trainspec (kubernetes, skypilot).")]
Volume = Annotated[str, typer.Option(metavar="NAME", help="Volume that all nodes mount (kubernetes, skypilot).")]


def emit(
    arguments: RecipeArguments,
    engine: For,
    output: Output,
    image: Image = "",
    volume: Volume = "",
    force: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Write a recipe's plan as another engine's configuration, with the command and the environment of the run.

    For a cluster manager (kubernetes, jobset, trainjob, skypilot), write the manifest that starts trainspec.

    Needs neither a GPU nor the engine. Unsupported values are rejected with an error that names them. DIR/emitted.json
    lists how each key is translated, what is only approximate, and what is not carried over.
    """
    emission = emit_recipe(arguments, engine, Container(image, volume))
    write_emission(emission, output, force=force)
    if as_json:
        print(json_text(read_object(output / EMITTED)))
    else:
        print("\n".join(_summary(emission, output)))


def _summary(emission: Emission, output: Path) -> Iterator[str]:
    """Yield a short table; emitted.json contains everything."""
    target = emission.target
    translation = emission.translation
    style = Style.of(sys.stdout)
    yield f"{output}: {', '.join(emission.files)} for {target.title} {target.version}"
    nearly = [one for one in translation.translated if one.approximate]
    rows = [("exact", f"{len(translation.translated) - len(nearly)} keys")]
    rows += [("approximate", f"{one.ours} -> {one.theirs or 'implied'}: {one.approximate}") for one in nearly]
    own = [one.ours for one in translation.not_carried if one.ours in NOT_CARRIED]
    of_script: dict[str, list[str]] = {}
    for one in translation.not_carried:
        if one.ours not in NOT_CARRIED:
            of_script.setdefault(one.why, []).append(f"{one.ours}={show(one.value)}")
    rows += [("not carried", f"{why}: {' '.join(values)}") for why, values in of_script.items()]
    rows += [("not carried", f"trainspec's own: {', '.join(own)}")] if own else []
    for (kind, text), before in zip(rows, ["", *(kind for kind, _ in rows)], strict=False):
        yield f"{style.bold(kind if kind != before else ''):<11}  {text}"
