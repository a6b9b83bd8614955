"""A Llama-style decoder, dense or with experts.

Shapes: B samples, S tokens per sample, D hidden size, E rotary dimension of a head.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from trainspec_cli.engine.models.attention import Attention, MultiHeadLatentAttention
from trainspec_cli.engine.models.experts import MixtureOfExperts
from trainspec_cli.engine.models.language_model import LanguageModel
from trainspec_cli.engine.models.layers import FeedForward, RMSNorm
from trainspec_cli.engine.models.rope import rope_angles
from trainspec_cli.recipe.keys.model import DecoderModel


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, model: DecoderModel, layer: int):
        super().__init__()
        attention = Attention if model.mla is None else MultiHeadLatentAttention
        self.attention_norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.attention = attention(model, model.window_of(layer))
        # The bias is added outside of attention, so that it is added only once if heads are spread over ranks and their
        # outputs summed.
        self.attention_bias = nn.Parameter(torch.empty(model.hidden_size)) if model.attention_bias == "all" else None
        self.ffn_norm = RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.ffn = MixtureOfExperts(model) if model.is_expert_layer(layer) else dense_feed_forward(model)

    def forward(self, x_BSD: Tensor, *rotation: Tensor) -> Tensor:
        mixed_BSD = self.attention(self.attention_norm(x_BSD), *rotation)
        x_BSD = x_BSD + (mixed_BSD if self.attention_bias is None else mixed_BSD + self.attention_bias)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


def dense_feed_forward(model: DecoderModel) -> FeedForward:
    return FeedForward(model.hidden_size, model.ffn_size, gated=model.gated_mlp, activation=model.activation)


class Decoder(LanguageModel):
    """A decoder. Queries and keys are rotated by position, or learned position embeddings are added to the token
    embedding."""

    cos_SE: Tensor
    sin_SE: Tensor
    positions_S: Tensor
    writes_per_layer: ClassVar[int] = 2

    def __init__(self, model: DecoderModel, seq_len: int, layers: range | None = None):
        super().__init__(model, layers, lambda layer: Block(model, layer))
        self.model = model
        self.seq_len = seq_len
        self.rotated_size = model.rotated_size
        self.position_embed = None
        if model.learned_positions and (layers is None or 0 in layers):
            self.position_embed = nn.Embedding(model.learned_positions, model.hidden_size)
        for name in ("cos_SE", "sin_SE"):
            self.register_buffer(name, torch.empty(seq_len, self.rotated_size), persistent=False)
        self.register_buffer("positions_S", torch.empty(seq_len, dtype=torch.int64), persistent=False)

    def embed_tokens(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = super().embed_tokens(tokens_BS)
        if self.position_embed is None:
            return x_BSD
        return x_BSD + self.position_embed(self.positions_S[: tokens_BS.shape[1]])

    def block_inputs(self, x_BSD: Tensor, documents_BS: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return cosines and sines for this rank's positions and, with documents, the attention mask."""
        if not self.model.rotates:
            return ()
        rotation = self.cos_SE[self.positions_S].to(x_BSD.dtype), self.sin_SE[self.positions_S].to(x_BSD.dtype)
        if documents_BS is None:
            return rotation
        # A query attends to the keys of its document up to its own position.
        same_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        return (*rotation, same_BSS.tril().unsqueeze(1))

    def init_buffers(self) -> None:
        super().init_buffers()
        model = self.model
        torch.arange(self.seq_len, out=self.positions_S)
        angles = rope_angles(self.seq_len, self.rotated_size, model.rope_theta, self.cos_SE.device, model.rope_scaling)
        both_SE = torch.cat((angles, angles), dim=-1)
        self.cos_SE.copy_(both_SE.cos())
        self.sin_SE.copy_(both_SE.sin())


build = Decoder
