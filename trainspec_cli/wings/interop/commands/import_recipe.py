"""`trainspec import FILE`: read another engine's configuration as a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
import yaml

from trainspec_cli.cli.options import AsJson
from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.reading.files import VERSION_LINE
from trainspec_cli.recipe.field_types import MISSING
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.wings.interop import READERS, TARGETS, ReadBack, Target, guess_engine, nest, read_back, read_source

File = Annotated[Path, typer.Argument(metavar="FILE", help="Another engine's JSON, YAML, Python module or script.")]
Output = Annotated[Path | None, typer.Option(metavar="FILE", help="Write the recipe to this file (default: print it).")]
From = Annotated[
    str, typer.Option("--from", metavar="ENGINE", help=f"One of {', '.join(READERS)} (default: by file name).")
]


def import_recipe(file: File, output: Output = None, engine: From = "", as_json: AsJson = False) -> None:
    """Read the configuration of an existing run as a recipe, so that trainspec can plan it.

    Reads DeepSpeed's JSON, the YAML of Accelerate, axolotl and MaxText, modules of torchtitan or Megatron-Bridge
    (parsed, not run), and Megatron-LM's arguments in a shell script. Whatever the file does not contain stays unset in
    the recipe: specify model=NAME, cluster=NAME and so on."""
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


# Build a recipe from another engine's configuration


ASKED = ("train.max_steps", "batching.global_batch_size", "data.seq_len")
"""Keys that a plan needs. If the file does not contain them, the recipe leaves them unset."""
NEEDED_OF_MODEL = "model.num_layers"
CHECKPOINT = "init.from"
"""Key of the initial checkpoint, which also determines the sizes of the model."""


@dataclass(frozen=True)
class Imported:
    target: Target
    file: Path
    content: ReadBack

    @property
    def missing(self) -> tuple[str, ...]:
        """The keys that must be specified on the command line."""
        model = () if {NEEDED_OF_MODEL, CHECKPOINT} & self.content.values.keys() else ("model",)
        cluster = ("cluster",)
        return (*model, *cluster, *(key for key in ASKED if key not in self.content.values))

    @property
    def recipe(self) -> str:
        values = dict(self.content.values)
        model = "auto" if CHECKPOINT in values else MISSING
        if NEEDED_OF_MODEL in values:
            model = "llama3_8b  # the sizes are replaced below"
            values["model.name"] = ""
        values.update({key: MISSING for key in ASKED if key not in values})
        lines = [
            f"# Read from {self.file.name!r} ({self.target.title}) by trainspec import.",
            VERSION_LINE.strip(),
            "defaults:",
            f"  - override /model: {model}",
            f"  - override /data: {'megatron' if values.get('data.source') == 'megatron' else 'tokens'}",
            f"  - override /cluster: {MISSING}",
            "  - override /layout: fsdp",
            "",
            yaml.safe_dump(nest(values), sort_keys=False).rstrip(),
            *(f"# not read: {key}: {why}" for key, why in self.content.unread.items()),
        ]
        return "\n".join(lines) + "\n"


def import_file(file: Path, engine: str = "") -> Imported:
    """Read an engine's configuration file. Raises RecipeError if it cannot be read or contains no known keys."""
    engine = engine or guess_engine(file)
    if engine not in READERS:
        near = closest(engine, READERS)
        hint = f"pass --from {near}" if near else f"known engines: {', '.join(READERS)}"
        raise RecipeError(Problem("usage", f"cannot read files of `{engine}`", "--from", hint))
    target = TARGETS[engine]
    content = read_back(target, read_source(file, engine))
    if not content.values:
        hint = f"known engines: {', '.join(READERS)}; choose one with --from"
        raise RecipeError(Problem("unreadable", f"{file} contains no known key of {target.title}", hint=hint))
    return Imported(target, file, content)


def write_recipe(imported: Imported, output: Path) -> None:
    """Write the recipe to a new file. Raises RecipeError if the file exists or cannot be written."""
    if output.exists():
        hint = "choose another name, or remove it first"
        raise RecipeError(Problem("output_exists", f"{output} exists", "--output", hint))
    try:
        write_text(output, imported.recipe)
    except OSError as error:
        message = f"{output} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, "--output", "choose an existing folder")) from error
