"""The weights of a checkpoint without the rest: what a run begins with, and what is exported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from trainspec_cli.engine.checkpoint.state import copy_twins
from trainspec_cli.engine.checkpoint.store import Held
from trainspec_cli.errors import MachineError

PREFIX = "model."
ADAPTERS = ("lora_a", "lora_b")
"""What a run adds to the weights of another that had none."""


def load_weights(folder: Path, held: Held) -> None:
    """Fill parameters and the buffers that training changes, from whatever layout; called by every rank together."""
    names = {name.removeprefix(PREFIX) for name in stored_tensors(folder)}
    state = {key: value for key, value in held.state().items() if key.startswith(PREFIX)}
    missing = {key for key in state if key.removeprefix(PREFIX) not in names}
    new = {key for key in missing if key.endswith(ADAPTERS)}
    _require(folder, sorted(key.removeprefix(PREFIX) for key in missing - new))
    wanted = {key: value for key, value in state.items() if key not in new}
    dcp.load(wanted, storage_reader=dcp.FileSystemReader(folder))
    copy_twins(held.shares, held.optimizer)


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Whole parameters by name, in fp32, read by this process alone."""
    tensors: dict[str, Tensor] = {f"{PREFIX}{name}": torch.empty(shape) for name, shape in shapes.items()}
    dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def stored_tensors(folder: Path) -> set[str]:
    """The names of all that the checkpoint holds of the model, with their prefix."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    return {name for name in metadata.state_dict_metadata if name.startswith(PREFIX)}


def _require(folder: Path, missing: list[str]) -> None:
    if missing:
        shown = ", ".join(missing[:8]) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
        raise MachineError(f"{folder} lacks {shown}: it is of another model", code="bad_checkpoint")
