"""Load only the weights of a checkpoint, to start a run from them or to export them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainspec_cli.engine.checkpoint.manifest import read_manifest
from trainspec_cli.engine.checkpoint.parts import Held, TensorPart, copy_twins
from trainspec_cli.engine.checkpoint.reading import fill_parts

PREFIX = "model."
ADAPTERS = ("lora_a", "lora_b")
"""Parameters that a run may add to a checkpoint without adapters."""


def load_weights(folder: Path, held: Held) -> None:
    """Fill parameters and the buffers that training changes, from a checkpoint of any layout.

    Raises MachineError if the checkpoint is of another model.
    """
    manifest = read_manifest(folder)
    parts = [part for part in held.parts() if part.name.startswith(PREFIX)]
    new = {part.name for part in parts if part.name.endswith(ADAPTERS) and part.name not in manifest.tensors}
    fill_parts(folder, manifest, [part for part in parts if part.name not in new])
    copy_twins(held.shares, held.optimizer)


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return whole parameters by name, in fp32, read by this process alone."""
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    parts = [TensorPart.whole(f"{PREFIX}{name}", tensor) for name, tensor in tensors.items()]
    fill_parts(folder, read_manifest(folder), parts)
    return tensors
