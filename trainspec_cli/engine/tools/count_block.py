"""Count the parameters of a user-defined block. A plan needs this number, and only the block's code determines it."""

from __future__ import annotations

import torch

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.engine.models.own import BlockMaker
from trainspec_cli.recipe.results.tools import BlockCount, BlockRequest


def run(request: BlockRequest) -> BlockCount:
    """Create the first block without allocating its parameters, and count them. An error in its code becomes a problem
    in the result."""
    try:
        with torch.device("meta"):
            block = BlockMaker(request.model).make(0)
    except RecipeError as error:
        return BlockCount(problem=error.problems[0])
    return BlockCount(sum(parameter.numel() for parameter in block.parameters()))
