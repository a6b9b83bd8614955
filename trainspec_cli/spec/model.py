"""What is trained. One frozen dataclass per family; `family` tells them apart in YAML."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DecoderModel:
    """Llama-style decoder: pre-norm RMSNorm, RoPE, grouped-query attention, SwiGLU."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Width of the gated feed-forward (SwiGLU has three matrices of hidden_size x ffn_size)."""
    vocab_size: int
    family: Literal["decoder"] = "decoder"
    name: str = ""
    tied_embeddings: bool = False
    """Input embedding and output head share one matrix."""
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5


ModelSpec = DecoderModel
