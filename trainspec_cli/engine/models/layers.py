"""Layers that all families share: root-mean-square normalisation, and feed-forwards with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.recipe.keys.model import Activation


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), along the last dim of x (..., D) (arXiv:1910.07467)."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class RMSNorm(nn.RMSNorm):
    rms_norm = staticmethod(rms_norm)

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight, self.eps)


def precise(x: Tensor) -> Tensor:
    """Convert to fp32, or keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),  # arXiv:2109.08668
}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202)."""
    return F.silu(gate) * up


class GatedActivation(nn.Module):
    """activation(gate) * up, or without a gate activation(up): the middle of a feed-forward."""

    swiglu = staticmethod(swiglu)

    def __init__(self, activation: Activation, gate_limit: float | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_limit = gate_limit

    def activate(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is None:
            return self.activation(up)
        if self.gate_limit is not None:
            # gpt_oss's variant of SwiGLU: both halves are clamped, and 1 is added to the linear one.
            gate = gate.clamp(max=self.gate_limit)
            up = up.clamp(-self.gate_limit, self.gate_limit)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        return self.swiglu(gate, up) if self.activation is F.silu else self.activation(gate) * up


class FeedForward(GatedActivation):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    def __init__(self, hidden_size: int, ffn_size: int, *, gated: bool, activation: Activation):
        super().__init__(activation)
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False) if gated else None
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x_BSD)
        up = self.up(x_BSD)
        return self.down(self.activate(gate, up))
