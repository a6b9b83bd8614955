"""Another engine's configuration as a recipe."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from trainspec_cli.core.errors import Problem, RecipeError, closest
from trainspec_cli.core.reading.files import VERSION_LINE
from trainspec_cli.recipe.field_types import MISSING
from trainspec_cli.run.folder.files import write_text
from trainspec_cli.wings.interop import READERS, TARGETS, Heard, Target, guess_engine, listen, nest, read_source

ASKED = ("train.max_steps", "batching.global_batch_size", "data.seq_len")
"""Keys that a plan needs; where the file does not say one, the recipe asks for it."""
NEEDED_OF_MODEL = "model.num_layers"
CHECKPOINT = "init.from"
"""It holds the sizes of the model, too."""


@dataclass(frozen=True)
class Imported:
    target: Target
    file: Path
    heard: Heard

    @property
    def missing(self) -> tuple[str, ...]:
        """Return what the recipe asks for on the command line."""
        model = () if {NEEDED_OF_MODEL, CHECKPOINT} & self.heard.values.keys() else ("model",)
        cluster = ("cluster",)
        return (*model, *cluster, *(key for key in ASKED if key not in self.heard.values))

    @property
    def recipe(self) -> str:
        return "\n".join(_recipe(self)) + "\n"


def import_file(file: Path, engine: str = "") -> Imported:
    """Read a file of an engine. Raises RecipeError where it cannot be read, or where nothing of it is known."""
    engine = engine or guess_engine(file)
    if engine not in READERS:
        near = closest(engine, READERS)
        hint = f"type --from {near}" if near else f"there are: {', '.join(READERS)}"
        raise RecipeError(Problem("usage", f"files of `{engine}` are not read", "--from", hint))
    target = TARGETS[engine]
    heard = listen(target, read_source(file, engine))
    if not heard.values:
        hint = f"engines that are read: {', '.join(READERS)}; name one with --from"
        raise RecipeError(Problem("unreadable", f"{file} says nothing that {target.title} would", hint=hint))
    return Imported(target, file, heard)


def write_recipe(imported: Imported, output: Path) -> None:
    """Write the recipe to a file that is not there yet. Raises RecipeError."""
    if output.exists():
        hint = "choose another name, or remove it first"
        raise RecipeError(Problem("output_exists", f"{output} exists", "--output", hint))
    try:
        write_text(output, imported.recipe)
    except OSError as error:
        message = f"{output} cannot be written: {error.strerror}"
        raise RecipeError(Problem("output_exists", message, "--output", "choose a folder that is there")) from error


def _recipe(imported: Imported) -> Iterator[str]:
    values = dict(imported.heard.values)
    model = NEEDED_OF_MODEL in values
    yield f"# Read from {imported.file.name!r} ({imported.target.title}) by trainspec import."
    yield VERSION_LINE.strip()
    yield "defaults:"
    named = "llama3_8b  # whose sizes are replaced below" if model else "auto" if CHECKPOINT in values else MISSING
    yield f"  - override /model: {named}"
    yield f"  - override /data: {'megatron' if values.get('data.source') == 'megatron' else 'tokens'}"
    yield f"  - override /cluster: {MISSING}"
    yield "  - override /layout: fsdp"
    yield ""
    if model:
        values["model.name"] = ""
    values.update({key: MISSING for key in ASKED if key not in values})
    yield yaml.safe_dump(nest(values), sort_keys=False).rstrip()
    yield from (f"# not read: {key}: {why}" for key, why in imported.heard.unread.items())
