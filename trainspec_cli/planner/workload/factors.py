"""What `comm.gradients: low_rank` sends of a decoder's gradients in the place of the matrices of its blocks."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.planner.workload.adapters import block_matrices
from trainspec_cli.spec.recipe.comm import is_worth_factoring
from trainspec_cli.spec.recipe.model import DecoderModel, ModelSpec


@dataclass(frozen=True)
class Factors:
    """The matrices of one block that are factored, as a rank of tp holds them."""

    values: int = 0
    left: int = 0
    """Values of all P, (rows, rank) each."""
    right: int = 0
    """Values of all Q, (columns, rank) each."""


def block_factors(model: ModelSpec, rank: int, tp: int = 1) -> Factors:
    """Return what is factored of a block; nothing of families for which `low_rank` is refused."""
    if not isinstance(model, DecoderModel) or model.experts is not None:
        return Factors()
    sizes = [size for size in block_matrices(model, tp).values() if is_worth_factoring(*size, rank)]
    rows, columns = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    return Factors(sum(height * width for height, width in sizes), rank * rows, rank * columns)
