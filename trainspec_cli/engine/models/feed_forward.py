"""Feed-forward layers: with a gate or without."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.recipe.keys.model import Activation


def squared_relu(x: Tensor) -> Tensor:
    """arXiv:2109.08668."""
    return F.relu(x).square()


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu2": squared_relu}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (arXiv:2002.05202)."""
    return F.silu(gate) * up


def clamped_glu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Compute gpt_oss's variant of SwiGLU: both halves are clamped, and 1 is added to the linear one."""
    gate = gate.clamp(max=limit)
    up = up.clamp(-limit, limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


class FeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""

    swiglu = staticmethod(swiglu)

    def __init__(self, hidden_size: int, ffn_size: int, *, gated: bool, activation: Activation):
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False) if gated else None
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BSD)))
        gate = self.gate(x_BSD)
        up = self.up(x_BSD)
        return self.down(self.swiglu(gate, up) if self.activation is F.silu else self.activation(gate) * up)
