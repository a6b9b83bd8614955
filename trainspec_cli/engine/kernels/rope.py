"""Rotary positions (arXiv:2104.09864), half by half. As `models.rope.apply_rope`.

Shapes: B samples, S tokens a sample, H heads, E size that is rotated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def halves(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Keeps nothing of x: the backward turns the other way."""
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
    """Each half is written where it belongs; nothing is put together afterwards."""
    half = x.shape[-1] // 2
    cos, sin = (angles[: x.shape[1], None, :half] for angles in (cos_SE, sin_SE))
    out = torch.empty_like(x)
    (first, second), (to_first, to_second) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
    torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=sign)
    torch.mul(second, cos, out=to_second).addcmul_(first, sin, value=-sign)
    return out
