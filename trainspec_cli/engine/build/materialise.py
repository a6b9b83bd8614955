"""A model or a stage of one: built on meta, allocated, and filled with its first values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.engine.quantised_shares import split_quantised
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.model import ModelSpec


def build_model(model: ModelSpec, seq_len: int, layers: range | None = None) -> Any:
    """Build the whole model, or the pipeline stage with `layers`."""
    return import_module(model.record.builder).build(model, seq_len, layers)


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

    def first_values(name: str, full: Tensor) -> Tensor:
        model.init_parameter(name, full, parameter_generator(seed, name, device))
        return full

    model.seed = seed
    plain, quantised = split_quantised(shares)
    for share in plain:
        full = torch.empty(share.full_shape, dtype=share.parameter.dtype, device=device)
        share.local.copy_(share.part_of(first_values(share.name, full)))
    for matrix in quantised:
        matrix.fill(first_values(matrix.name, torch.empty(matrix.full_shape, device=device)))
    start_buffers(model, device, seed, positions_S)


@torch.no_grad()
def start_buffers(model: Any, device: torch.device, seed: int, positions_S: Tensor | None) -> None:
    model.seed = seed
    model.init_buffers()
    if positions_S is not None:
        model.positions_S = positions_S.to(device)


def parameter_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "big") >> 1)
