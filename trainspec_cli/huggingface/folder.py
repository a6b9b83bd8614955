"""A folder as `from_pretrained` takes it: does it hold what the model needs, and nothing else?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainspec_cli.errors import Problem, RecipeError
from trainspec_cli.huggingface.config import model_type
from trainspec_cli.huggingface.safetensors import StoredTensor, open_checkpoint
from trainspec_cli.huggingface.tensors import HEAD, parameters
from trainspec_cli.reading.files import UnreadableFileError
from trainspec_cli.reading.json_file import read_object
from trainspec_cli.spec.recipe.model import DecoderModel

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
TOKENIZER_CONFIG, CHAT_TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
SMALL_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE, "special_tokens_map.json")
"""What an export takes over from the folder that a run began with."""
MAX_TENSORS = 200_000
SHOWN = 8
"""Tensors named of each kind of fault."""
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$")
"""Tensors of old checkpoints that follow from config.json."""


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Raises RecipeError where it is missing or no JSON."""
    file = folder / name
    if not file.is_file():
        got = f"{folder} holds no {name}" if folder.is_dir() else f"there is no folder {folder.absolute()}"
        raise RecipeError(Problem("missing_file", got, "init.from", "type init.from=hf:<a checkpoint's folder>"))
    try:
        return read_object(file)
    except UnreadableFileError as error:
        told = error.problems[0]
        problem = Problem("bad_checkpoint", told.message, "init.from", file=told.file, line=told.line)
        raise RecipeError(problem) from error


def open_weights(folder: Path, model: DecoderModel) -> dict[str, StoredTensor]:
    """The tensors that make up `model`. Raises RecipeError naming those that miss, are too many, or of another shape;
    MachineError where a file is damaged."""
    model_type(model)
    _check_count(model)
    entries = open_checkpoint(folder)
    if problems := find_faults(entries, model, folder):
        raise RecipeError(problems)
    return entries


def _check_count(model: DecoderModel) -> None:
    """Raises RecipeError where a model has more tensors than can be gone through by their names."""
    experts = model.experts.num_experts if model.experts else 0
    if model.num_layers * (experts + 1) > MAX_TENSORS:
        message = f"{model.num_layers:,} layers of {experts:,} experts are more tensors than a checkpoint is read with"
        hint = f"layers x experts may be {MAX_TENSORS:,}"
        raise RecipeError(Problem("out_of_range", message, "model.num_layers", hint))


def find_faults(entries: Mapping[str, StoredTensor], model: DecoderModel, folder: Path) -> list[Problem]:
    wanted = {piece.tensor: piece.tensor_shape for parameter in parameters(model) for piece in parameter.pieces}
    missing = [name for name in wanted if name not in entries]
    extra = [name for name in entries if name not in wanted and not _is_redundant(name, model)]
    misshapen = [
        f"{name} is {_show(entries[name].shape)} and should be {_show(shape)}"
        for name, shape in wanted.items()
        if name in entries and entries[name].shape != shape
    ]
    faults = {"lacks": missing, "holds what the model has no place for:": extra, "has wrong shapes:": misshapen}
    return [
        Problem("bad_checkpoint", f"{folder} {what} {list_names(names)}", "init.from", _HINT)
        for what, names in faults.items()
        if names
    ]


_HINT = "its tensors are not those that its config.json speaks of: download it again, or name another folder"


def _is_redundant(name: str, model: DecoderModel) -> bool:
    return bool(_COMPUTED.search(name)) or (name == HEAD and model.tied_embeddings)


def list_names(names: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _show(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
