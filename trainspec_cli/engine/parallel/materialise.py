"""Allocate the shards of a model built on meta, and fill them with the same values whatever the layout."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.engine.shares import Share


def allocate(model: nn.Module, device: torch.device, *, offload: bool) -> None:
    """Move the model from meta to `device`; with `offload` its parameters go to host memory."""
    model.to_empty(device="cpu" if offload else device)
    if offload:
        for module in model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, torch.empty_like(buffer, device=device))


@torch.no_grad()
def materialise(
    model: Any, shares: Sequence[Share], device: torch.device, seed: int, positions_S: Tensor | None = None
) -> None:
    """Fill `model`, allocated, of which `shares` are the parameters; `positions_S` where it sees part of a sequence.

    Each parameter has a generator of its own, seeded by the run's seed and its name, so that its values depend
    neither on the layout nor on the order; one full parameter at a time is held.
    """
    for share in shares:
        full = torch.empty(share.full_shape, dtype=share.parameter.dtype, device=device)
        model.init_parameter(share.name, full, parameter_generator(seed, share.name, device))
        share.local.copy_(share.part_of(full))
    model.init_buffers()
    if positions_S is not None:
        model.positions_S = positions_S.to(device)


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
