"""The tensors of a folder whose model transformers' own module computes: each is a parameter, under the module's
name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.data.huggingface.safetensors import (
    Parameter,
    StoredTensor,
    adapter_settings,
    halves_of,
    open_checkpoint,
    whole,
)
from trainspec_cli.recipe.keys.model import TransformersModel
from trainspec_cli.recipe.keys.training import TARGETS, LoraSpec

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


class Shaped(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...


def module_parameters(tensors: Mapping[str, Shaped]) -> list[Parameter]:
    """Return the parameters that consist of these tensors."""
    return [whole(MODULE + name, name, tuple(tensor.shape)) for name, tensor in tensors.items()]


def module_adapters(parameter: Parameter, model: TransformersModel, lora: LoraSpec) -> list[Parameter]:
    """Return the two factors of a matrix's adapter; nothing if the matrix has no adapter."""
    owner = parameter.name.removesuffix(".weight")
    leaf = owner.rpartition(".")[2]
    linears = {linear for part in model.blocks for linear in part.linear_sizes}
    in_block = owner.startswith(f"{MODULE}{model.block_list}.") and owner != parameter.name
    if not in_block or leaf not in adapted_names(model, lora) or (leaf, *parameter.shape) not in linears:
        return []
    return halves_of(owner, owner.removeprefix(MODULE), parameter.shape, lora)


def adapted_names(model: TransformersModel, lora: LoraSpec) -> list[str]:
    """Return the last part of the names of the linear layers that get an adapter."""
    if not lora.rank:
        return []
    names = dict.fromkeys(name for part in model.blocks for name, _, _ in part.linear_sizes)
    return [name for name in names if lora.targets == TARGETS or name in lora.targets]


def module_adapter_config(model: TransformersModel, lora: LoraSpec, base: str | None) -> JsonObject:
    """Return the content of adapter_config.json. `base` identifies the frozen weights for from_pretrained."""
    return adapter_settings(lora, base, adapted_names(model, lora))
