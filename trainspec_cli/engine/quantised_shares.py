"""The parts of quantised matrices that a rank holds, filled from whole matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainspec_cli.engine.nf4 import Nf4, Place, dequantise, magnitude_table, pair_table, quantise
from trainspec_cli.engine.shares import Share

TENSORS = ("nf4_codes", "nf4_magnitudes", "nf4_scales")
"""The buffers that stand in the place of a layer's `weight`, in the order of `Nf4`."""


@dataclass(frozen=True)
class QuantisedMatrix:
    """A rank's part of a matrix; whole matrices are quantised, so that the layout changes no value."""

    name: str
    """The name that the matrix has where it is not quantised."""
    parts: tuple[Share, ...]
    """In the order of `Nf4`."""

    @property
    def full_shape(self) -> tuple[int, int]:
        rows, half = self.parts[0].full_shape
        return rows, 2 * half

    @torch.no_grad()
    def fill(self, full_FD: Tensor) -> None:
        for share, tensor in zip(self.parts, quantise(full_FD), strict=True):
            share.local.copy_(share.part_of(tensor))


def split_quantised(shares: Sequence[Share]) -> tuple[list[Share], list[QuantisedMatrix]]:
    """Return the shares of parameters in full, and the matrices that the others make up."""
    plain = [share for share in shares if not is_quantised(share.name)]
    others = {share.name: share for share in shares if is_quantised(share.name)}
    owners = dict.fromkeys(name.rpartition(".")[0] for name in others)
    return plain, [
        QuantisedMatrix(f"{owner}.weight", tuple(others[f"{owner}.{leaf}"] for leaf in TENSORS)) for owner in owners
    ]


def is_quantised(name: str) -> bool:
    """Return whether a tensor of that name is part of a quantised matrix."""
    return name.endswith(TENSORS)


def quantised_parameters(part: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return the buffers of `part` that are parts of quantised matrices, as parameters of the same memory."""
    found = ((name, buffer) for name, buffer in part.named_buffers() if is_quantised(name))
    return [(name, nn.Parameter(buffer, requires_grad=False)) for name, buffer in found]


def names_of(weight: str) -> tuple[str, ...]:
    """Return the names of the tensors that stand for a layer's `weight`, of that name, where it is quantised."""
    return tuple(f"{weight.removesuffix('weight')}{leaf}" for leaf in TENSORS)


def restore(held: Nf4) -> Tensor:
    """Return a whole matrix in fp32."""
    device = held.codes.device
    return dequantise(held, Place(), pair_table(device), magnitude_table(device), torch.float32)
