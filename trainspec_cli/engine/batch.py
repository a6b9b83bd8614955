"""What passes between the data, the models and the step, which do not know one another."""

from __future__ import annotations

from torch import Tensor

MicroBatch = tuple[Tensor, Tensor]
"""(tokens, targets), each (B, S) of int64, on the device; or images (B, C, ...) of fp32 and their labels of int64."""

IGNORED_TARGET = -1
"""A target that takes no part in the loss."""


def held_part(micro_batch: MicroBatch, positions_S: Tensor | None) -> MicroBatch:
    """The positions that a rank holds of each sequence; None: all."""
    if positions_S is None:
        return micro_batch
    tokens, targets = micro_batch
    return tokens[:, positions_S], targets[:, positions_S]
