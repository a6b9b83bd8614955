"""Sizes of a plan's decoder, in elements, parameters and tokens."""

from __future__ import annotations

from trainspec_cli.spec.recipe.model import DecoderModel
from trainspec_cli.spec.results.plan import Plan

COMPUTE_BYTES = {"bf16": 2, "fp32": 4}


def block_matrices(model: DecoderModel) -> tuple[int, ...]:
    """Elements of each matrix of a block."""
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden, ffn = model.hidden_size, model.ffn_size
    return (hidden * query, hidden * key, hidden * key, query * hidden, hidden * ffn, hidden * ffn, ffn * hidden)


def unit_params(plan: Plan, model: DecoderModel) -> tuple[int, int]:
    """Parameters of a block, and of all that lies outside the blocks: the two kinds of sharded units."""
    block = sum(block_matrices(model)) + 2 * model.hidden_size
    return block, plan.params - model.num_layers * block


def micro_tokens(plan: Plan) -> int:
    return plan.micro_batch_size * plan.spec.data.seq_len
