"""From meta to memory: allocate the shards and fill them with the same values whatever the layout."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


@torch.no_grad()
def materialise(model: Any, device: torch.device, seed: int) -> None:
    """Allocate `model` on `device` and initialise it.

    Each parameter has a generator of its own, seeded by the run's seed and its name, so that its values depend
    neither on the layout nor on the order; one full parameter at a time is held.
    """
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        model.init_parameter(name, full, parameter_generator(seed, name, device))
        copy_shard(full, parameter)
    model.init_buffers()


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def copy_shard(full: Tensor, parameter: Tensor) -> None:
    """Copy this rank's part of `full` into `parameter`; no communication."""
    if isinstance(parameter, DTensor):
        mine = distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(mine.to_local())
    else:
        parameter.copy_(full)
