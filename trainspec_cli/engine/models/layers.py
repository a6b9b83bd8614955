"""Layers shared by model families: feed-forward layers with or without a gate, and normalisation by row or by
channel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
    """Convert to fp32, but keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "relu2": lambda x: F.relu(x).square(),  # squared ReLU (arXiv:2109.08668)
}


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up (arXiv:2002.05202)."""
    return F.silu(gate) * up


class GatedActivation(nn.Module):
    """The middle of a feed-forward layer: activation(gate) * up, or activation(up) without a gate."""

    swiglu = staticmethod(swiglu)

    def __init__(self, activation: Activation, gate_limit: float | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[activation]
        self.gate_limit = gate_limit

    def activate(self, gate: Tensor | None, up: Tensor) -> Tensor:
        if gate is None:
            return self.activation(up)
        if self.gate_limit is not None:
            # gpt_oss's variant of SwiGLU: both halves are clamped, and 1 is added to the linear half.
            gate = gate.clamp(max=self.gate_limit)
            up = up.clamp(-self.gate_limit, self.gate_limit)
            return gate * torch.sigmoid(1.702 * gate) * (up + 1)
        # Only SwiGLU has alternative kernels (`recipe/keys/kernels.py`).
        return self.swiglu(gate, up) if self.activation is F.silu else self.activation(gate) * up


class FeedForward(GatedActivation):
    """A feed-forward layer: down(activation(gate(x)) * up(x)), or down(activation(up(x))) without a gate."""

    def __init__(self, hidden_size: int, ffn_size: int, *, gated: bool, activation: Activation):
        super().__init__(activation)
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False) if gated else None
        self.up = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x_BSD)
        up = self.up(x_BSD)
        return self.down(self.activate(gate, up))


class BatchNorm(nn.Module):
    """Batch normalisation: by the batch's statistics in training, and by their running means in evaluation
    (arXiv:1502.03167).

    In every layout, the statistics equal those of a single process that computes all ranks' micro-batches. They are
    computed in fp32. Shapes: B samples, C channels, then the spatial dimensions.
    """

    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps = eps
        self.momentum = momentum
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
        """Sums in place over all ranks that hold parts of a micro-batch; parts may have any size. Set externally."""
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_variance", torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return _normalise(x, self.weight, self.bias, self)
        scale = precise(self.weight) * (self.running_variance + self.eps).rsqrt()
        return _scale(x, scale, precise(self.bias) - self.running_mean * scale)


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation. Running statistics are updated in the backward pass, which runs only once even with
    recomputation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        own = _channel_sum(x)
        totals = norm.sum_over_ranks(torch.cat([own, own.new_full((1,), x.numel() // x.shape[1])]))
        mean = totals[:-1] / totals[-1]
        count = totals[-1]
        variance = norm.sum_over_ranks(_channel_sum((precise(x) - _along(mean, x)).square_())) / count
        inverse_std = (variance + norm.eps).rsqrt()
        ctx.norm = norm
        ctx.save_for_backward(x, weight, mean, variance, count)
        scale = precise(weight) * inverse_std
        return _scale(x, scale, precise(bias) - mean * scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, mean, variance, count = ctx.saved_tensors
        norm = ctx.norm
        inverse_std = (variance + norm.eps).rsqrt()
        normal = (precise(x) - _along(mean, x)).mul_(_along(inverse_std, x))
        gradient = precise(gradient)
        to_bias = _channel_sum(gradient)
        to_weight = _channel_sum(gradient * normal)
        both = norm.sum_over_ranks(torch.stack([to_bias, to_weight])) / count
        to_x = gradient - _along(both[0], x) - normal.mul_(_along(both[1], x))
        to_x *= _along(precise(weight) * inverse_std, x)
        # The running variance is unbiased. Non-finite statistics are excluded, because they would persist forever.
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((norm.running_mean, mean), (norm.running_variance, unbiased)):
            running.lerp_(torch.where(new.isfinite(), new.to(running.dtype), running), norm.momentum)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), to_bias.to(weight.dtype), None


@torch.compiler.disable
def _normalise(x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
    return _BatchNorm.apply(x, weight, bias, norm)


def _scale(x: Tensor, scale_C: Tensor, shift_C: Tensor) -> Tensor:
    """Scale and shift in fp32, and round once to the format of x."""
    return torch.addcmul(_along(shift_C, x), precise(x), _along(scale_C, x)).to(x.dtype)


def _channel_sum(x: Tensor) -> Tensor:
    """Return the sum (C,) of (B, C, ...), in at least fp32."""
    return x.sum(dim=[0, *range(2, x.dim())], dtype=torch.promote_types(x.dtype, torch.float32))


def _along(values_C: Tensor, x: Tensor) -> Tensor:
    """Reshape (C,) to broadcast over x (B, C, ...)."""
    return values_C.view(1, -1, *(1 for _ in x.shape[2:]))
