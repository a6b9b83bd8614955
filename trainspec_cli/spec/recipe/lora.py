"""Low-rank adapters, trained instead of the weights themselves."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.numbers import NonNegativeInt, PositiveFloat

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

    @property
    def scale(self) -> float:
        return self.alpha / self.rank
