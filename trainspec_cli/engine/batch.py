"""The batches that pass between the data, the models and the step, which do not import one another."""

from __future__ import annotations

from torch import Tensor

MicroBatch = tuple[Tensor, ...]
"""(tokens, targets), each (B, S) of int64, on the device; or images (B, C, ...) of fp32 and their labels of int64.

Where attention is to stay within documents, (tokens, targets, documents): the number of each token's document.
"""

IGNORED_TARGET = -1
"""A target that takes no part in the loss."""


def held_part(micro_batch: MicroBatch, positions_S: Tensor | None) -> MicroBatch:
    """The positions that a rank holds of each sequence; None: all."""
    if positions_S is None:
        return micro_batch
    return tuple(tensor[:, positions_S] for tensor in micro_batch)
