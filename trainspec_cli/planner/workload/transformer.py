"""Parameters and model FLOPs of a decoder."""

from __future__ import annotations

from trainspec_cli.spec.model import DecoderModel


def count_block_matmul_params(model: DecoderModel) -> int:
    """Weights of one block's matrices: q, k, v, output, and the three of SwiGLU."""
    attention = model.hidden_size * model.head_dim * 2 * (model.num_heads + model.num_kv_heads)
    return attention + 3 * model.hidden_size * model.ffn_size


def count_params(model: DecoderModel) -> int:
    """Every parameter once; tied embeddings count once."""
    embeddings = model.vocab_size * model.hidden_size * (1 if model.tied_embeddings else 2)
    norms = (2 * model.num_layers + 1) * model.hidden_size
    return embeddings + model.num_layers * count_block_matmul_params(model) + norms


def flops_per_token(model: DecoderModel, seq_len: int) -> float:
    """Model FLOPs of forward and backward, a token.

    6 per parameter of a matrix product (2 forward, 4 backward; the embedding look-up is none) and attention's
    two products over the causal half of the sequence: 6 * layers * heads * head_dim * seq_len.
    PaLM (arXiv:2204.02311, appendix B) counts the full square instead; recomputed work never counts.
    """
    matmul_params = model.num_layers * count_block_matmul_params(model) + model.vocab_size * model.hidden_size
    attention = 6.0 * model.num_layers * model.num_heads * model.head_dim * seq_len
    return 6.0 * matmul_params + attention
