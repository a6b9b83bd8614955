"""Causal attention with grouped-query heads, windows and sinks, or with queries, keys and values from low-rank latents.

Shapes: B samples, S tokens per sample, D hidden size, H heads, K key-value heads, E head size, W window. For latents: V
value head size, R rotated part of a head, L latent size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.models.layers import RMSNorm, make_norm, precise
from trainspec_cli.engine.models.rope import apply_rope, neighbours_to_halves, score_factor
from trainspec_cli.recipe.keys.model import SINK_DIMS, DecoderModel, Rotation


def attention(q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return (B, H, S, E). `scale` multiplies the scores; None means 1 / sqrt(E).

    Attention is causal if there is no mask (bool, broadcast to (B, H, S, T): True if a query attends to a key).
    """
    grouped = q_BHSE.shape[1] != k_BKTE.shape[1]
    return F.scaled_dot_product_attention(
        q_BHSE, k_BKTE, v_BKTE, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
    )


def capped_attention(
    q_BHSE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, mask: Tensor | None, scale: float | None, cap: float
) -> Tensor:
    """Like `attention`, with scores limited to cap * tanh(score / cap). The fused kernels do not support this, so all
    scores are stored."""
    groups = q_BHSE.shape[1] // k_BKTE.shape[1]
    k_BHTE, v_BHTE = (x.repeat_interleave(groups, dim=1) for x in (k_BKTE, v_BKTE))
    if mask is None:
        mask = torch.ones(q_BHSE.shape[2], k_BHTE.shape[2], dtype=torch.bool, device=q_BHSE.device).tril()
    scores_BHST = (q_BHSE @ k_BHTE.transpose(-1, -2)) * (q_BHSE.shape[-1] ** -0.5 if scale is None else scale)
    scores_BHST = (cap * torch.tanh(scores_BHST / cap)).masked_fill(~mask, -torch.inf)
    return precise(scores_BHST).softmax(dim=-1).to(v_BHTE.dtype) @ v_BHTE


class CausalCore(nn.Module):
    """Scores, softmax and values: the part of attention that mixes tokens along the sequence.

    With a window, a token attends to itself and the W - 1 tokens before it. The sequence is then divided into blocks of
    W tokens, and a block's queries attend to the keys of the same block and the previous one. The cost per token is
    therefore proportional to the window size, not to the sequence length.
    """

    attention = staticmethod(attention)

    def __init__(
        self,
        *,
        window: int | None = None,
        scale: float | None = None,
        sinks: bool = False,
        softcap: float | None = None,
    ):
        """`scale` multiplies the scores; None means 1 / sqrt(E). With `sinks`, queries contain the sink logit of their
        head. `softcap` limits the scores."""
        super().__init__()
        self.softcap = softcap
        self.window = window
        self.scale = scale
        self.sinks = sinks

    def forward(self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """Attend to all previous keys or, with a bool mask (B, 1, S, S), only to the keys that the mask allows."""
        q = q_BSHE.transpose(1, 2)
        k = k_BSKE.transpose(1, 2)
        v = v_BSKE.transpose(1, 2)
        value_size = v.shape[-1]
        if value_size < q.shape[-1]:  # the fused kernels need heads of equal size
            v = F.pad(v, (0, q.shape[-1] - value_size))
        if mask_B1SS is not None and self.window is not None:
            row = torch.arange(q.shape[2], device=q.device)
            mask_B1SS = mask_B1SS & (row[:, None] - row < self.window)
        if mask_B1SS is None and self.window is not None and self.window < q.shape[2]:
            mixed = self._windowed(q, k, v, self.window)
        else:
            # Positions do not need to restart at each document, because attention depends only on the distances between
            # positions.
            mixed = self._attend(q, k, v, mask_B1SS)
        return mixed[..., :value_size].transpose(1, 2)

    def _windowed(self, q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
        """Attend block by block. The first block is plain causal attention; the other blocks become separate
        samples."""
        batch = q.shape[0]
        seq_len = q.shape[2]
        first = self._attend(q[:, :, :window], k[:, :, :window], v[:, :, :window], None)
        q, k, v = (F.pad(x, (0, 0, 0, -seq_len % window)).unflatten(2, (-1, window)) for x in (q, k, v))
        k, v = (torch.cat((x[:, :, :-1], x[:, :, 1:]), dim=3) for x in (k, v))
        blocks = k.shape[2]
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q[:, :, 1:], k, v))
        row, column = (torch.arange(size, device=q.device) for size in (window, 2 * window))
        mask = (column > row[:, None]) & (column <= row[:, None] + window)
        rest = self._attend(q, k, v, mask).unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)
        return torch.cat((first, rest[:, :, : seq_len - window]), dim=2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend in one kernel call. Sinks are represented by an additional first key, whose logit comes from the
        queries and whose value is zero."""
        if self.softcap is not None:
            return capped_attention(q, k, v, mask, self.scale, self.softcap)
        if not self.sinks:
            return self.attention(q, k, v, mask, self.scale)
        in_front = (0, 0, 1, 0)
        k = F.pad(k, in_front)
        is_first_S = torch.arange(k.shape[2], device=k.device) == 0
        is_logit_E = torch.arange(k.shape[3], device=k.device) == k.shape[3] - SINK_DIMS
        k = k + (is_first_S[:, None] & is_logit_E).to(k.dtype)
        v = F.pad(v, in_front)
        if mask is not None:
            return self.attention(q, k, v, F.pad(mask, (1, 0), value=True), self.scale)
        # An additional first query keeps queries and keys aligned for the kernel's causal mask, where query i attends
        # to keys 0 to i.
        return self.attention(F.pad(q, in_front), k, v, None, self.scale)[:, :, 1:]


def carry_sinks(q_BSHE: Tensor, k_BSKE: Tensor, sinks_H: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Append dims to the queries, with the sink logit of their head, and zeros to the keys."""
    logit_BSH1 = (sinks_H / scale).to(q_BSHE.dtype)[:, None].expand(*q_BSHE.shape[:3], 1)
    q_BSHE = F.pad(torch.cat((q_BSHE, logit_BSH1), dim=-1), (0, SINK_DIMS - 1))
    return q_BSHE, F.pad(k_BSKE, (0, SINK_DIMS))


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv:2305.13245)."""

    rope = staticmethod(apply_rope)

    def __init__(self, model: DecoderModel, window: int | None = None, rotation: Rotation = "global"):
        super().__init__()
        inputs = model.hidden_size
        head_dim = model.head_dim
        bias = model.attention_bias != "none"
        self.head_dim = head_dim
        self.rotated_size = model.rotated_size
        self.pairs_neighbours = model.rotary_pairs == "neighbours"
        self.scale = model.attention_scale or 1 / math.sqrt(head_dim)
        if rotation == "global":
            self.scale *= score_factor(model.rope_scaling)
        self.core = CausalCore(
            window=window, scale=self.scale, sinks=model.attention_sinks, softcap=model.attention_softcap
        )
        self.q = nn.Linear(inputs, model.num_heads * head_dim, bias=bias)
        self.k = nn.Linear(inputs, model.num_kv_heads * head_dim, bias=bias)
        self.v = nn.Linear(inputs, model.num_kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(model.num_heads * head_dim, inputs, bias=False)
        self.q_norm = self.k_norm = None
        self.norms_heads = model.qk_norm_over == "head"
        if model.qk_norm and self.norms_heads:
            self.q_norm, self.k_norm = make_norm(model, head_dim), make_norm(model, head_dim)
        elif model.qk_norm:
            self.q_norm = make_norm(model, model.num_heads * head_dim, over_heads=True)
            self.k_norm = make_norm(model, model.num_kv_heads * head_dim, over_heads=True)
        self.sinks = nn.Parameter(torch.empty(model.num_heads)) if model.attention_sinks else None

    def forward(
        self, x_BSD: Tensor, cos_SE: Tensor | None = None, sin_SE: Tensor | None = None, mask_B1SS: Tensor | None = None
    ) -> Tensor:
        split = (-1, self.head_dim)
        q, k, v = (project(x_BSD) for project in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None and not self.norms_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHE, k_BSKE, v_BSKE = (x.unflatten(-1, split) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.norms_heads:
            q_BSHE = self.q_norm(q_BSHE)
            k_BSKE = self.k_norm(k_BSKE)
        if cos_SE is not None and sin_SE is not None:
            q_BSHE, k_BSKE = (self._rotate(x, cos_SE, sin_SE) for x in (q_BSHE, k_BSKE))
        if self.sinks is not None:
            q_BSHE, k_BSKE = carry_sinks(q_BSHE, k_BSKE, self.sinks, self.scale)
        return self.out(self.core(q_BSHE, k_BSKE, v_BSKE, mask_B1SS).flatten(2))

    def _rotate(self, x_BSHE: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        """Rotate the first R elements of each head."""
        rotated, rest = x_BSHE[..., : self.rotated_size], x_BSHE[..., self.rotated_size :]
        if self.pairs_neighbours:
            rotated = neighbours_to_halves(rotated)
        rotated = self.rope(rotated, cos_SR, sin_SR)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class MultiHeadLatentAttention(nn.Module):
    """Latent attention (DeepSeek-V2, arXiv:2405.04434).

    Only a part of each head is rotated. All heads share the rotated part of the keys.
    """

    rope = staticmethod(apply_rope)

    def __init__(self, model: DecoderModel, window: int | None = None, _rotation: Rotation = "global"):
        super().__init__()
        mla = model.mla
        inputs = model.hidden_size
        heads = model.num_heads
        assert mla is not None
        self.mla = mla
        self.head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.pairs_neighbours = model.rotary_pairs == "neighbours"
        self.core = CausalCore(window=window, scale=self.head_dim**-0.5 * score_factor(model.rope_scaling))
        eps = mla.norm_eps or model.norm_eps
        if mla.q_lora_rank:
            self.q_down = nn.Linear(inputs, mla.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_lora_rank, eps=eps)
        self.q = nn.Linear(mla.q_lora_rank or inputs, heads * self.head_dim, bias=False)
        self.kv_down = nn.Linear(inputs, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, eps=eps)
        self.kv = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.out = nn.Linear(heads * mla.v_head_dim, inputs, bias=False)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        # Queries, and keys with values, come from separate functions, so that the projections' intermediate results are
        # freed before attention.
        q_BSHE = self._queries(x_BSD, cos_SR, sin_SR)
        k_BSHE, v_BSHV = self._keys_values(x_BSD, cos_SR, sin_SR)
        return self.out(self.core(q_BSHE, k_BSHE, v_BSHV, mask_B1SS).flatten(2))

    def _queries(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        source = self.q_norm(self.q_down(x_BSD)) if self.mla.q_lora_rank else x_BSD
        q_BSHE = self.q(source).unflatten(-1, (-1, self.head_dim))
        plain, rotated = q_BSHE.split((self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=-1)
        return torch.cat((plain, self._rotate(rotated, cos_SR, sin_SR)), dim=-1)

    def _rotate(self, x_BSHR: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        return self.rope(neighbours_to_halves(x_BSHR) if self.pairs_neighbours else x_BSHR, cos_SR, sin_SR)

    def _keys_values(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
        mla = self.mla
        latent_BSL, rotated_BSR = self.kv_down(x_BSD).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        both = self.kv(self.kv_norm(latent_BSL)).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        plain, v_BSHV = both.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        shared_BS1R = self._rotate(rotated_BSR[:, :, None], cos_SR, sin_SR)
        return torch.cat((plain, shared_BS1R.expand(*plain.shape[:3], -1)), dim=-1), v_BSHV
