"""Low-rank adapters, trained instead of the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.field_types import NonNegativeInt, PositiveFloat

NF4_BLOCK = 64
"""Weights of a row that are quantised to 4 bits with one scale."""
NF4_SCALE_BLOCK = 256
"""Such scales that are quantised to 8 bits with one scale of their own."""
NF4_CHUNK = 2**24
"""Weights that are dequantised at a time, which bounds what is held of them in fp32."""
TARGETS = ("q", "k", "v", "out", "gate", "up", "down")
"""The matrices of attention and feed-forward, as the engine names them."""


@dataclass(frozen=True)
class LoraSpec:
    rank: NonNegativeInt = 0
    """0: no adapters, every weight is trained."""
    alpha: PositiveFloat = 16.0
    """The adapters' output is scaled by alpha / rank."""
    targets: tuple[str, ...] = TARGETS
    """The matrices of each block that get one; routed experts get none."""
    base: Literal["full", "nf4"] = "full"
    """How the frozen matrices of the blocks are kept: in full, or in 4-bit NormalFloat (QLoRA), 4.127 bits a weight, of
    which each data-parallel rank holds a copy; embedding, head and norms stay in full."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def is_quantised(self) -> bool:
        """Return whether the frozen matrices of the blocks are kept in 4 bits."""
        return self.rank > 0 and self.base == "nf4"
