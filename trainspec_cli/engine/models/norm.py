"""Root-mean-square normalisation (arXiv:1910.07467).

Shapes: D the normalised size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), along the last dim of x (..., D)."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class RMSNorm(nn.RMSNorm):
    rms_norm = staticmethod(rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps)


def precise(x: Tensor) -> Tensor:
    """Convert to fp32, or keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
