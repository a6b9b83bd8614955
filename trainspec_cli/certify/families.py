"""Small models with everything that a family has: what the clauses are measured on."""

from __future__ import annotations

from trainspec_cli.spec.model import DecoderModel, ModelSpec

SEQ_LEN = 64
SAMPLES = 8

FAMILIES: dict[str, ModelSpec] = {
    "dense": DecoderModel(
        num_layers=4, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=128, vocab_size=256
    ),
    "tied": DecoderModel(
        num_layers=4,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        ffn_size=128,
        vocab_size=256,
        tied_embeddings=True,
    ),
}
