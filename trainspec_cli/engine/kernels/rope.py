"""Rotary positions (arXiv:2104.09864), half by half; see `models.rope.apply_rope`.

Shapes: B samples, S tokens per sample, H heads, E rotated size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def halves(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate without saving x: the backward rotates the other way."""
    return _Halves.apply(x_BSHE, cos_SE, sin_SE)


class _Halves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SE, sin_SE)
        return _turn(x, cos_SE, sin_SE, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_SE, sin_SE = ctx.saved_tensors
        return _turn(dy, cos_SE, sin_SE, 1), None, None


def _turn(x: Tensor, cos_SE: Tensor, sin_SE: Tensor, sign: int) -> Tensor:
    """Multiply by the cosines, then add each half's counterpart in place, so that no concatenation is needed."""
    seq_len, half = x.shape[1], x.shape[-1] // 2
    sin = sin_SE[:seq_len, None, :half]
    first, second = x.chunk(2, dim=-1)
    out = x * cos_SE[:seq_len, None]
    to_first, to_second = out.chunk(2, dim=-1)
    to_first.addcmul_(second, sin, value=sign)
    to_second.addcmul_(first, sin, value=-sign)
    return out
