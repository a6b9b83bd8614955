"""User-defined blocks, with the values that the recipe provides for the planner (`OwnModel`)."""

from __future__ import annotations

from trainspec_cli.planner.workload import Gemm, Layers, Work
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import OwnModel

WIDTHS_OF_NORMS = 5
"""Number of vectors of hidden width that a transformer block keeps in addition to the outputs of its matrices."""


def layer_params(model: OwnModel) -> int:
    """Return the parameter count of a block. It is 0 if the recipe does not specify it yet; the rules reject such a
    recipe."""
    return model.block_params or 0


def count_params(model: OwnModel, *, active: bool = False) -> int:
    tables = 1 if model.tied_embeddings else 2
    ends = (tables * model.vocab_size + 1) * model.hidden_size
    return model.num_layers * layer_params(model) + ends


def flops_per_token(model: OwnModel, seq_len: int) -> float:
    weights = model.num_layers * layer_params(model) + model.vocab_size * model.hidden_size
    return 6.0 * weights + mixing_flops_per_token(model, seq_len)


def mixing_flops_per_token(model: OwnModel, _seq_len: int) -> float:
    return 3.0 * model.num_layers * model.block_mixing_flops_per_token


def saved_bytes_per_token(model: OwnModel) -> float:
    """Return the number of bytes per token that a block keeps in bf16. If the recipe does not specify it, a block is
    assumed to keep the outputs of its matrices and some vectors of hidden width."""
    if model.block_saved_bytes_per_token is not None:
        return model.block_saved_bytes_per_token
    return 2.0 * (layer_params(model) / model.hidden_size + WIDTHS_OF_NORMS * model.hidden_size)


def layer_works(model: OwnModel, tokens: float, _seq_len: int, _layout: Layout) -> Layers:
    hidden = model.hidden_size
    params = layer_params(model)
    work = Work(
        gemms=(Gemm(tokens, params / hidden, hidden),),
        attention_flops=tokens * model.block_mixing_flops_per_token,
        pass_bytes=2.0 * tokens * saved_bytes_per_token(model),
        kernels=16,
        params=params,
        saved_bytes=tokens * saved_bytes_per_token(model),
        saved_gemm_bytes=min(2.0 * tokens * hidden, tokens * saved_bytes_per_token(model)),
        input_bytes=2.0 * tokens * hidden,
    )
    return ((work,),) * model.num_layers
