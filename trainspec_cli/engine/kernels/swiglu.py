"""silu(gate) * up (arXiv:2002.05202) that saves less for the backward; see `models.feed_forward.swiglu`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def frugal(gate: Tensor, up: Tensor) -> Tensor:
    """Compute SwiGLU, and save only the two inputs; the backward recomputes the activation."""
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
