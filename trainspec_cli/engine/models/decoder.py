"""A llama-style decoder.

Shapes: B samples, S tokens a sample, D hidden size, H heads, K key-value heads, E head size, F feed-forward size,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.cross_entropy import LinearCrossEntropy
from trainspec_cli.spec.model import DecoderModel

INIT_STD = 0.02


def rope_angles(seq_len: int, head_dim: int, theta: float, device: torch.device | None = None) -> Tensor:
    """Angles of rotary position embeddings (arXiv:2104.09864, eq. 15): (S, E/2), fp32."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    return torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequencies)


def apply_rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate the pairs (i, i + E/2) of each head, the order that Hugging Face's llama uses."""
    seq_len = x_BSHE.shape[1]
    first, second = x_BSHE.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return x_BSHE * cos_SE[:seq_len, None, :] + rotated * sin_SE[:seq_len, None, :]


class CausalCore(nn.Module):
    """Scores, softmax and values: the part of attention that crosses the sequence."""

    def forward(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor) -> Tensor:
        mixed_BHSE = F.scaled_dot_product_attention(
            q_BSHE.transpose(1, 2),
            k_BSKE.transpose(1, 2),
            v_BSKE.transpose(1, 2),
            is_causal=True,
            enable_gqa=q_BSHE.shape[2] != k_BSKE.shape[2],
        )
        return mixed_BHSE.transpose(1, 2)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    def __init__(self, model: DecoderModel):
        super().__init__()
        self.head_dim = model.head_dim
        self.core = CausalCore()
        self.q = nn.Linear(model.hidden_size, model.num_heads * model.head_dim, bias=False)
        self.k = nn.Linear(model.hidden_size, model.num_kv_heads * model.head_dim, bias=False)
        self.v = nn.Linear(model.hidden_size, model.num_kv_heads * model.head_dim, bias=False)
        self.out = nn.Linear(model.num_heads * model.head_dim, model.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q_BSHE = apply_rope(self.q(x_BSD).view(heads), cos_SE, sin_SE)
        k_BSKE = apply_rope(self.k(x_BSD).view(heads), cos_SE, sin_SE)
        v_BSKE = self.v(x_BSD).view(heads)
        return self.out(self.core(q_BSHE, k_BSKE, v_BSKE).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202)."""

    def __init__(self, model: DecoderModel):
        super().__init__()
        self.gate = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.up = nn.Linear(model.hidden_size, model.ffn_size, bias=False)
        self.down = nn.Linear(model.ffn_size, model.hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x_BSD)) * self.up(x_BSD))


class Block(nn.Module):
    """Pre-norm residual block: x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, model: DecoderModel):
        super().__init__()
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.attention = Attention(model)
        self.ffn_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps)
        self.ffn = FeedForward(model)

    def forward(self, x_BSD: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), cos_SE, sin_SE)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Decoder(nn.Module):
    """Token ids -> summed cross-entropy of the next token (or logits, to write text).

    As a pipeline's stage it holds some of the layers: the first stage embeds, the others take hidden states; the last
    ends in the loss, the others in hidden states.
    """

    cos_SE: Tensor
    sin_SE: Tensor
    positions_S: Tensor
    tensor_cuts: ClassVar[dict[str, int]] = {
        "embed.weight": 0,
        "head.weight": 0,
        "blocks.*.attention.[qkv].weight": 0,
        "blocks.*.attention.out.weight": 1,
        "blocks.*.ffn.gate.weight": 0,
        "blocks.*.ffn.up.weight": 0,
        "blocks.*.ffn.down.weight": 1,
    }
    """Which dimension of which parameter tensor parallelism cuts."""
    tensor_partial: ClassVar[tuple[str, ...]] = ()
    """Whole parameters inside regions: a rank's gradient is its share."""

    def __init__(self, model: DecoderModel, seq_len: int, layers: range | None = None):
        super().__init__()
        self.model = model
        self.seq_len = seq_len
        layers = range(model.num_layers) if layers is None else layers
        first, last = 0 in layers, model.num_layers - 1 in layers
        embeds = first or (last and model.tied_embeddings)
        self.embed = nn.Embedding(model.vocab_size, model.hidden_size) if embeds else None
        self.blocks = nn.ModuleDict({str(layer): Block(model) for layer in layers})
        self.norm = nn.RMSNorm(model.hidden_size, eps=model.norm_eps) if last else None
        self.head = None
        if last and not model.tied_embeddings:
            self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
        self.loss: LinearCrossEntropy | None = LinearCrossEntropy() if last else None
        for name in ("cos_SE", "sin_SE"):
            self.register_buffer(name, torch.empty(seq_len, model.head_dim), persistent=False)
        self.register_buffer("positions_S", torch.empty(seq_len, dtype=torch.int64), persistent=False)

    def forward(self, tokens_or_x: Tensor, targets_BS: Tensor | None = None) -> Tensor:
        """-> hidden states (B, S, D) of a stage that is not the last; else the summed loss (scalar, fp32) where targets
        are given, and logits (B, S, V) where none are."""
        x_BSD = self.embed(tokens_or_x) if self.embed and not tokens_or_x.is_floating_point() else tokens_or_x
        cos_SE = self.cos_SE[self.positions_S].to(x_BSD.dtype)
        sin_SE = self.sin_SE[self.positions_S].to(x_BSD.dtype)
        for block in self.blocks.values():
            x_BSD = block(x_BSD, cos_SE, sin_SE)
        if self.norm is None or self.loss is None:
            return x_BSD
        head = self.head or self.embed
        assert head is not None, "the last stage of a tied model holds the embedding too"
        return self.loss(self.norm(x_BSD), head.weight, targets_BS)

    def block_modules(self) -> Sequence[nn.Module]:
        """The units that are sharded and recomputed as one."""
        return list(self.blocks.values())

    def compile_modules(self) -> Sequence[nn.Module]:
        """The units whose arithmetic a compiler may fuse; what lies between them stays eager."""
        return [*self.blocks.values(), *([self.loss.chunk] if self.loss else [])]

    def region_modules(self) -> Sequence[nn.Module]:
        """The modules whose matrices tensor parallelism cuts: whole input, summed output."""
        blocks = cast(Iterable[Block], self.blocks.values())
        return [module for block in blocks for module in (block.attention, block.ffn)]

    def attention_modules(self) -> Sequence[nn.Module]:
        """Those that cross the sequence, in their `core`."""
        return [block.attention for block in cast(Iterable[Block], self.blocks.values())]

    def expert_modules(self) -> Sequence[nn.Module]:
        """The mixtures of experts; none here."""
        return []

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Norms to 1; matrices Normal(0, 0.02), those into the residual stream by sqrt(2 * layers) less (GPT-2)."""
        if full.dim() == 1:
            full.fill_(1.0)
            return
        into_residual = name.endswith(("out.weight", "down.weight"))
        full.normal_(
            0.0, INIT_STD / math.sqrt(2 * self.model.num_layers) if into_residual else INIT_STD, generator=generator
        )

    def init_buffers(self) -> None:
        torch.arange(self.seq_len, out=self.positions_S)
        angles = rope_angles(self.seq_len, self.model.head_dim, self.model.rope_theta, self.cos_SE.device)
        both_SE = torch.cat((angles, angles), dim=-1)
        self.cos_SE.copy_(both_SE.cos())
        self.sin_SE.copy_(both_SE.sin())
