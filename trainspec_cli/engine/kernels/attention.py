"""Attention with a specific torch kernel, where torch would otherwise choose one.

Shapes: B samples, H heads, K key-value heads, S queries, T keys, E head size. Like `models.attention.attention`, all
kernels are causal if there is no mask.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def _by(kernel: SDPBackend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Return (B, H, S, E). Raises RuntimeError if the kernel does not support these inputs."""
    with sdpa_kernel(kernel):
        return _fused(q, k, v, mask, scale)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


flash = partial(_by, SDPBackend.FLASH_ATTENTION)
"""FlashAttention-2 (arXiv:2307.08691)."""
math = partial(_by, SDPBackend.MATH)
"""Plain attention, with all scores (B, H, S, T) in memory."""
efficient = partial(_by, SDPBackend.EFFICIENT_ATTENTION)
"""Memory-efficient attention (arXiv:2112.05682)."""
cudnn = partial(_by, SDPBackend.CUDNN_ATTENTION)


def expanded(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Repeat keys and values for each query head, for kernels without grouped-query support."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return _fused(q, k, v, mask, scale)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Use FlexAttention, compiled for its mask (arXiv:2412.05496), which skips blocks that are masked out.

    Evaluation is not compiled, and uncompiled FlexAttention would keep all scores in memory, so torch's default is used
    there.
    """
    if not torch.is_grad_enabled():
        return _fused(q, k, v, mask, scale)
    if mask is None:
        seen = _causal_blocks(q.shape[2], k.shape[2], q.device)
    else:
        from torch.nn.attention.flex_attention import create_block_mask

        wide = mask.expand(len(q), 1, q.shape[2], k.shape[2])

        def meets(sample: Tensor, _head: Tensor, row: Tensor, column: Tensor) -> Tensor:
            return wide[sample, 0, row, column]

        seen = create_block_mask(meets, len(q), None, q.shape[2], k.shape[2], device=str(q.device))
    return _flex_attention()(q, k, v, block_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


@cache
def _flex_attention() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_blocks(queries: int, keys: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    return create_block_mask(lambda _b, _h, row, column: row >= column, None, None, queries, keys, device=str(device))
