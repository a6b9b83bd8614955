"""The tensors of a folder whose model transformers' own module computes: each is a parameter, under the module's
name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainspec_cli.data.huggingface.safetensors import Parameter, StoredTensor, open_checkpoint, whole
from trainspec_cli.data.weights.stored import PartedTensor
from trainspec_cli.recipe.keys.model import TransformersModel

MODULE = "module."
"""The first part of the parameters' names in the engine, which wraps the module."""


def open_module(folder: Path, model: TransformersModel) -> dict[str, StoredTensor]:
    """Return the folder's tensors by their names in the module. The names in a folder written without the model's head
    lack their first part. Raises RecipeError if there are none, and MachineError if a file is damaged."""
    entries = open_checkpoint(folder)
    prefix = model.prefix
    if prefix and not any(name.startswith(prefix) for name in entries):
        return {name if name.startswith("lm_head.") else prefix + name: entry for name, entry in entries.items()}
    return entries


def module_parameters(tensors: Mapping[str, StoredTensor | PartedTensor]) -> list[Parameter]:
    """Return the parameters that consist of these tensors."""
    return [whole(MODULE + name, name, tensor.shape) for name, tensor in tensors.items()]
