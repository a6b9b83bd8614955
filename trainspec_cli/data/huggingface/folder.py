"""A folder for `from_pretrained`: check that it contains exactly the tensors that the model needs."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path

from trainspec_cli.core.environment_names import HUB_MIRROR
from trainspec_cli.core.errors import Problem, RecipeError
from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.reading.files import UnreadableFileError, read_object
from trainspec_cli.core.reading.hub_cache import hub_cache, hub_name
from trainspec_cli.data.huggingface.config import HUB_TYPES, model_type
from trainspec_cli.data.huggingface.safetensors import (
    HEAD,
    PackedTensor,
    Shape,
    StoredTensor,
    open_checkpoint,
    pair_packed,
    tensor_shapes,
)
from trainspec_cli.recipe.keys.model import TextModel

CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CHAT_TEMPLATE = "chat_template.jinja"
SPECIAL_TOKENS = "special_tokens_map.json"
SMALL_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, SPECIAL_TOKENS)
"""Files that an export copies from the folder whose weights the run started from."""
MAX_TENSORS = 200_000
SHOWN = 8
"""Maximum number of tensors named in a message."""


def read_config(folder: Path, name: str = CONFIG) -> JsonObject:
    """Read a JSON file in the folder. Raises RecipeError if it is missing or not JSON."""
    file = folder / name
    if not file.is_file():
        got = f"{folder} has no {name}" if folder.is_dir() else f"{folder.absolute()} does not exist"
        hint = "set init.from=hf:<a checkpoint's folder>"
        if not folder.is_dir() and (named := hub_name(str(folder))):
            got += f", and the Hub's cache {hub_cache()} does not have {named.name} ({named.revision})"
            revision = "" if named.revision == "main" else f" --revision {named.revision}"
            hint = (
                f"run trainspec get hf:{named.name}{revision}, and set init.from=hf:FOLDER; without a network, run "
                f"hf download {named.name}{revision} --local-dir FOLDER elsewhere and copy the folder here; HF_HOME "
                f"names another cache, and {HUB_MIRROR} a folder that holds {named.name}"
            )
        raise RecipeError(Problem("missing_file", got, "init.from", hint))
    try:
        return read_object(file)
    except UnreadableFileError as error:
        found = error.problems[0]
        problem = Problem("bad_checkpoint", found.message, "init.from", file=found.file, line=found.line)
        raise RecipeError(problem) from error


def open_weights(folder: Path, model: TextModel) -> dict[str, StoredTensor | PackedTensor]:
    """Return the tensors of `model`.

    Raises RecipeError, naming any tensors that are missing, unexpected or of the wrong shape, and MachineError if a
    file is damaged."""
    model_type(model)
    check_count(model)
    entries = pair_packed(open_checkpoint(folder))
    prefix = HUB_TYPES[model_type(model)].names.prefix
    if prefix and not any(name.startswith(prefix) for name in entries):
        entries = {name if name.startswith("lm_head.") else prefix + name: entry for name, entry in entries.items()}
    if problems := find_faults(entries, model, folder):
        raise RecipeError(problems)
    return entries


def check_count(model: TextModel) -> None:
    """Raise RecipeError if a model has too many tensors to check by name."""
    experts = model.experts.num_experts if model.experts else 0
    if model.num_layers * (experts + 1) > MAX_TENSORS:
        message = f"{model.num_layers:,} layers of {experts:,} experts are too many tensors for one checkpoint"
        hint = f"layers x experts may be at most {MAX_TENSORS:,}"
        raise RecipeError(Problem("out_of_range", message, "model.num_layers", hint))


def find_faults(entries: Mapping[str, StoredTensor | PackedTensor], model: TextModel, folder: Path) -> list[Problem]:
    shapes = {name: entry.shape for name, entry in entries.items()}
    allowed = {HEAD} if model.tied_embeddings else set[str]()
    names = HUB_TYPES[model_type(model)].names
    if names.predicts and not model.prediction_layers:  # layers that predict further tokens, which the model leaves out
        number = re.compile(rf"{re.escape(names.layers)}\.(\d+)\.")
        numbered = ((name, number.match(name)) for name in entries)
        allowed |= {name for name, found in numbered if found and int(found[1]) >= model.num_layers}
    return compare_tensors(tensor_shapes(model), shapes, allowed, folder)


def compare_tensors(
    wanted: Mapping[str, Shape], shapes: Mapping[str, Shape], allowed: Collection[str], folder: Path
) -> list[Problem]:
    """List the tensors that are missing from `folder`, those that are neither wanted nor `allowed`, and those with
    wrong shapes."""
    missing = [name for name in wanted if name not in shapes]
    extra = [name for name in shapes if name not in wanted and name not in allowed]
    misshapen = [
        f"{name} is {_show(shapes[name])} but should be {_show(shape)}"
        for name, shape in wanted.items()
        if name in shapes and shapes[name] != shape
    ]
    faults = {"lacks": missing, "has tensors that the model lacks:": extra, "has wrong shapes:": misshapen}
    return [
        Problem("bad_checkpoint", f"{folder} {what} {list_names(names)}", "init.from", _HINT)
        for what, names in faults.items()
        if names
    ]


_HINT = "its tensors do not match its config.json: download it again, or name another folder"


def list_names(names: list[str]) -> str:
    """Join the first names, and append the number of remaining ones."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _show(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
