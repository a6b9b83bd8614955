"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): queries, keys and values through low-rank latents.

Shapes: B samples, S tokens per sample, D hidden size, H heads, E size of a query's or key's head, V of a value's,
R its rotated part, L the latent's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainspec_cli.engine.models.attention import CausalCore
from trainspec_cli.engine.models.norm import RMSNorm
from trainspec_cli.engine.models.rope import apply_rope, score_factor
from trainspec_cli.spec.recipe.model import DecoderModel


class MultiHeadLatentAttention(nn.Module):
    """Latent attention. A part of each head is rotated; the rotated part of the keys is shared by all heads."""

    rope = staticmethod(apply_rope)

    def __init__(self, model: DecoderModel, window: int | None = None):
        super().__init__()
        mla, inputs, heads = model.mla, model.hidden_size, model.num_heads
        assert mla is not None
        self.mla, self.head_dim = mla, mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.core = CausalCore(window=window, scale=self.head_dim**-0.5 * score_factor(model.rope_scaling))
        if mla.q_lora_rank:
            self.q_down = nn.Linear(inputs, mla.q_lora_rank, bias=False)
            self.q_norm = RMSNorm(mla.q_lora_rank, eps=model.norm_eps)
        self.q = nn.Linear(mla.q_lora_rank or inputs, heads * self.head_dim, bias=False)
        self.kv_down = nn.Linear(inputs, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=False)
        self.kv_norm = RMSNorm(mla.kv_lora_rank, eps=model.norm_eps)
        self.kv = nn.Linear(mla.kv_lora_rank, heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False)
        self.out = nn.Linear(heads * mla.v_head_dim, inputs, bias=False)

    def forward(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        q_BSHE = self._queries(x_BSD, cos_SR, sin_SR)
        k_BSHE, v_BSHV = self._keys_values(x_BSD, cos_SR, sin_SR)
        return self.out(self.core(q_BSHE, k_BSHE, v_BSHV, mask_B1SS).flatten(2))

    def _queries(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> Tensor:
        source = self.q_norm(self.q_down(x_BSD)) if self.mla.q_lora_rank else x_BSD
        q_BSHE = self.q(source).unflatten(-1, (-1, self.head_dim))
        plain, rotated = q_BSHE.split((self.mla.qk_nope_head_dim, self.mla.qk_rope_head_dim), dim=-1)
        return torch.cat((plain, self.rope(rotated, cos_SR, sin_SR)), dim=-1)

    def _keys_values(self, x_BSD: Tensor, cos_SR: Tensor, sin_SR: Tensor) -> tuple[Tensor, Tensor]:
        mla = self.mla
        latent_BSL, rotated_BSR = self.kv_down(x_BSD).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        both = self.kv(self.kv_norm(latent_BSL)).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        plain, v_BSHV = both.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        shared_BS1R = self.rope(rotated_BSR[:, :, None], cos_SR, sin_SR)
        return torch.cat((plain, shared_BS1R.expand(*plain.shape[:3], -1)), dim=-1), v_BSHV
