"""The weights of a checkpoint without the rest: what a run begins with, and what is exported."""

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
"""What a run adds to the weights of another that had none."""


def load_weights(folder: Path, held: Held) -> None:
    """Fill parameters and the buffers that training changes, from whatever layout.

    Raises MachineError where the checkpoint is of another model.
    """
    manifest = read_manifest(folder)
    parts = [part for part in held.parts() if part.name.startswith(PREFIX)]
    new = {part.name for part in parts if part.name.endswith(ADAPTERS) and part.name not in manifest.tensors}
    fill_parts(folder, manifest, [part for part in parts if part.name not in new])
    copy_twins(held.shares, held.optimizer)


def read_weights(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Whole parameters by name, in fp32, read by this process alone."""
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    parts = [TensorPart.whole(f"{PREFIX}{name}", tensor) for name, tensor in tensors.items()]
    fill_parts(folder, read_manifest(folder), parts)
    return tensors
