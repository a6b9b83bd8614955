"""The state of the optimizers of the engine, tensor by tensor, and what an update allocates beside it."""

from __future__ import annotations

from collections.abc import Iterable

from trainspec_cli.plan.memory.engine.units import Matrix, Unit
from trainspec_cli.recipe.keys.model_parts import CONV_TAPS
from trainspec_cli.recipe.keys.optim import BLOCK, QUANTISED_ROW, QUANTISED_SIZE, STACKED_VALUES, KeptState

MOMENT = 4.0
"""Bytes of a moment that is not quantised, and of a block's scale."""
CHUNK_VALUES = 2**24
"""Values that adamw8bit updates at a time (`engine/optim/adamw8bit.py`)."""
CHUNK_BYTES = 22.0
"""Bytes of each of them: gradient and moments in fp32, and, while one is quantised, its blocks and their codes."""
MATRICES_AT_ONCE = 9
"""Copies of the largest matrix, or stack of small ones, that muon has at a time in the format that it computes in:
Newton-Schulz's own five, the parts that are exchanged and those that arrive."""


def state_bytes(optimizer: KeptState, unit: Unit, *, in_block: bool, outer_bytes: float = 0.0) -> float:
    """Return the bytes of the optimizer's state of a unit's trained parameters, on the rank with the largest part;
    `outer_bytes`: of a parameter, those of an outer optimizer."""
    own = sum(
        _bytes_of_row(optimizer, (rows, row), in_block) * -(-rows // unit.shards) for rows, row in unit.trained.matrices
    )
    return own + outer_bytes * unit.trained.own


def _bytes_of_row(optimizer: KeptState, matrix: Matrix, in_block: bool) -> float:
    rows, row = matrix
    if isinstance(optimizer, float):
        return optimizer * row
    if optimizer == "sgd":
        return 0.0
    if optimizer == "muon" and in_block and is_hidden(matrix):
        return MOMENT * row
    if optimizer == "adamw8bit" and rows * row >= QUANTISED_SIZE and row >= QUANTISED_ROW:
        return 2 * (row + MOMENT * -(-row // BLOCK))
    return 2 * MOMENT * row


def is_hidden(matrix: Matrix) -> bool:
    """Return whether muon orthogonalises a matrix of a block; vectors and the taps of convolutions it leaves to adamw.

    Stacked biases count as matrices, as they are few.
    """
    return matrix[1] not in (1, CONV_TAPS)


def update_bytes(optimizer: KeptState, blocks: Iterable[Unit], outside: Iterable[Unit], width: float) -> float:
    """Return the bytes of an update's temporaries, of which the largest parameter has the most; muon computes in a
    format of `width` bytes."""
    of_blocks = [matrix for unit in blocks for matrix in unit.trained.matrices]
    own = [-(-rows // unit.shards) * row for unit in (*blocks, *outside) for rows, row in unit.trained.matrices]
    if optimizer == "adamw8bit":
        return CHUNK_BYTES * min(CHUNK_VALUES, max(own, default=0))
    if optimizer == "muon":
        hidden = [rows * row for rows, row in of_blocks if is_hidden((rows, row))]
        stacked = min(STACKED_VALUES, sum(hidden))
        return MATRICES_AT_ONCE * width * max(stacked, max(hidden, default=0))
    return 0.0
