"""What an optimizer keeps and does for each parameter, on average over a model: its state, traffic and arithmetic."""

from __future__ import annotations

from functools import lru_cache

from trainspec_cli.plan.memory.engine.optimizer import is_hidden, state_bytes
from trainspec_cli.plan.memory.engine.units import block_unit, expert_matrices, outside_unit
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.lora import LoraSpec
from trainspec_cli.recipe.keys.model import ModelSpec, TextModel, has_layer_list
from trainspec_cli.recipe.keys.optim import BLOCK, KeptState, OptimizerName

ALONE = Layout()
ADAMW_BYTES = 8.0
QUANTISED_BYTES = 2 + 8 / BLOCK
"""Codes of two moments, and two scales a block."""
UPDATE_BYTES: dict[OptimizerName, float] = {"adamw8bit": 260.0, "muon": 104.0}
"""Memory traffic of the operations of an update, a value: read and written by each operation of
`engine/optim/adamw8bit.py`, and of a matrix by `engine/optim/muon.py`, without Newton-Schulz. Counted as the operations
have it (tests/engine/optim); the other optimizers' one kernel reads and writes gradients, weights and moments once."""
STEPS = 5
WIRE_BYTES = 2.0
"""A value of a matrix that travels to the rank which orthogonalises it, and once more on the way back."""


@lru_cache(maxsize=256)
def moment_bytes(model: ModelSpec, optimizer: KeptState, lora: LoraSpec) -> float:
    """Return the bytes of the optimizer's state, a trained parameter, on average."""
    if isinstance(optimizer, float):
        return optimizer
    if optimizer in ("adamw", "sgd"):
        return ADAMW_BYTES if optimizer == "adamw" else 0.0
    if not has_layer_list(model):
        return QUANTISED_BYTES if optimizer == "adamw8bit" else ADAMW_BYTES
    blocks = [block_unit(model, layer, ALONE, lora) for layer in model.layer_list]
    outside = [] if lora.rank else [outside_unit(model, ALONE, first=True, last=True)]
    total = sum(state_bytes(optimizer, unit, in_block=True) for unit in blocks)
    total += sum(state_bytes(optimizer, unit, in_block=False) for unit in outside)
    return total / sum(unit.trained.full for unit in (*blocks, *outside))


@lru_cache(maxsize=256)
def matrix_share(model: TextModel) -> float:
    """Return the part of a model's parameters that muon orthogonalises."""
    blocks = [block_unit(model, layer, ALONE, LoraSpec()) for layer in model.layer_list]
    hidden = sum(rows * row for unit in blocks for rows, row in unit.matrices if is_hidden((rows, row)))
    return hidden / (sum(unit.full for unit in blocks) + outside_unit(model, ALONE, first=True, last=True).full)


@lru_cache(maxsize=256)
def newton_schulz_flops(model: TextModel) -> tuple[float, float]:
    """Return the FLOPs of orthogonalising each matrix once: (all layers' own ones, all experts).

    A step makes of A rows of B values, A the smaller, X X^T and its product with X (2 A^2 B each), and the square of
    the former (2 A^3): muon (arXiv:2502.16982, section 2.1).
    """
    dense = experts = 0.0
    for layer in model.layer_list:
        stacks = list(expert_matrices(model.as_decoder, 1)) if "experts" in layer.mixers else []
        stacked = [(number, rows * row) for number, rows, row in stacks]
        own = [matrix for matrix in block_unit(model, layer, ALONE, LoraSpec()).matrices if matrix not in stacked]
        dense += sum(_flops(rows, row) for rows, row in own if is_hidden((rows, row)))
        experts += sum(number * _flops(rows, row) for number, rows, row in stacks if row > 1)
    return dense, experts


def _flops(rows: float, row: float) -> float:
    small, large = min(rows, row), max(rows, row)
    return STEPS * (4.0 * small**2 * large + 2.0 * small**3)
