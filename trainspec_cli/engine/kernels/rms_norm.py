"""Root-mean-square normalisation (arXiv:1910.07467) that saves less for the backward; see `models.norm.rms_norm`.

Shapes: D the normalised size, the last dim of x.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def frugal(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Normalise, and save x and one number per row."""
    return _FrugalRmsNorm.apply(x, weight_D, eps)


class _FrugalRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
        wide = _widen(x)
        inverse_rms = _inverse_rms(wide, eps)
        ctx.save_for_backward(x, weight_D, inverse_rms)
        return (wide * inverse_rms).mul_(weight_D).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight_D, inverse_rms = ctx.saved_tensors
        normal, dy = _widen(x) * inverse_rms, _widen(dy)
        to_weight_D = (dy * normal).flatten(0, -2).sum(0)
        dnormal = dy * weight_D
        shared = (dnormal * normal).mean(-1, keepdim=True)
        dx = dnormal.addcmul_(normal, shared, value=-1).mul_(inverse_rms)
        return dx.to(x.dtype), to_weight_D.to(weight_D.dtype), None


def _widen(x: Tensor) -> Tensor:
    """Convert to fp32, or keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _inverse_rms(wide: Tensor, eps: float | None) -> Tensor:
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    return (wide.square().mean(-1, keepdim=True) + eps).rsqrt()
