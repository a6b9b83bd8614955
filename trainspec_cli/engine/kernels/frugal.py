"""Kernels that save less data for the backward pass than the defaults.

Shapes: B samples, S tokens per sample, H heads, E rotary dimension; D the normalised size, the last dim of x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Normalise by RMS (arXiv:1910.07467), saving only x and one number per row; see `models.layers.rms_norm`."""
    return _FrugalRmsNorm.apply(x, weight_D, eps)


class _FrugalRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
        wide = _widen(x)
        eps = torch.finfo(wide.dtype).eps if eps is None else eps
        inverse_rms = (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight_D, inverse_rms)
        return (wide * inverse_rms).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight_D, inverse_rms = ctx.saved_tensors
        normal = _widen(x) * inverse_rms
        dy = _widen(dy)
        to_weight_D = (dy * normal).flatten(0, -2).sum(0)
        # With n = x r, where r is the inverse RMS: dx = r (dn - n mean(dn n)).
        dnormal = dy * weight_D
        shared = (dnormal * normal).mean(-1, keepdim=True)
        dx = dnormal.addcmul_(normal, shared, value=-1).mul_(inverse_rms)
        return dx.to(x.dtype), to_weight_D.to(weight_D.dtype), None


def _widen(x: Tensor) -> Tensor:
    """Convert to fp32, but keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rope(x_BSHE: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
    """Rotate (arXiv:2104.09864) each half. The backward pass rotates the gradient in the opposite direction and does
    not need x; see `models.rope.apply_rope`."""
    return _FrugalRope.apply(x_BSHE, cos_SE, sin_SE)


class _FrugalRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos_SE: Tensor, sin_SE: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SE, sin_SE)
        return _turn(x, cos_SE, sin_SE, -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos_SE, sin_SE = ctx.saved_tensors
        return _turn(dy, cos_SE, sin_SE, 1), None, None


def _turn(x: Tensor, cos_SE: Tensor, sin_SE: Tensor, sign: int) -> Tensor:
    """Multiply by the cosines, and then add the other half times the sines in place, which avoids a concatenation."""
    seq_len = x.shape[1]
    half = x.shape[-1] // 2
    sin = sin_SE[:seq_len, None, :half]
    first, second = x.chunk(2, dim=-1)
    out = x * cos_SE[:seq_len, None]
    to_first, to_second = out.chunk(2, dim=-1)
    to_first.addcmul_(second, sin, value=sign)
    to_second.addcmul_(first, sin, value=-sign)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv:2002.05202), saving only the two inputs; see `models.layers.swiglu`."""
    return _FrugalSwiglu.apply(gate, up)


class _FrugalSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(dy * up, gate), F.silu(gate).mul_(dy)
