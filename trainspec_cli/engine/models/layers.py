"""Layers shared by model families: feed-forward layers with or without a gate, and normalisation by row or by
channel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainspec_cli.engine.accelerators import KINDS
from trainspec_cli.recipe.keys.model import Activation, DecoderModel


def rms_norm(x: Tensor, weight_D: Tensor, eps: float | None) -> Tensor:
    """Return weight * x / sqrt(mean(x^2) + eps), along the last dim of x (..., D) (arXiv:1910.07467)."""
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class RMSNorm(nn.RMSNorm):
    rms_norm = staticmethod(rms_norm)
    offset = 0.0
    """Added to the weight. A model with an offset stores weights around 0 instead of 1 (`norm_offset`)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.rms_norm(x, self.weight + self.offset if self.offset else self.weight, self.eps)


class NormOverHeads(RMSNorm):
    """An RMSNorm of queries or keys that covers all heads together, which tensor parallelism may split (OLMo 2)."""

    sum_over_ranks: Callable[[Tensor], Tensor] | None = None
    """Sums in place over the ranks that have the other heads; set externally. None: this rank has all heads."""

    eps: float

    def __init__(self, size: int, eps: float):
        super().__init__(size, eps=eps)
        self.whole_size = size

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.sum_over_ranks is None else _normalise_heads(x, self.weight, self)


class _NormOverHeads(torch.autograd.Function):
    """The norm of a part of the heads: in each direction, the ranks sum one value per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, norm: NormOverHeads) -> Tensor:
        assert norm.sum_over_ranks is not None
        wide = precise(x)
        mean_square = norm.sum_over_ranks(wide.square().sum(-1, keepdim=True)) / norm.whole_size
        inverse = (mean_square + norm.eps).rsqrt()
        ctx.norm = norm
        ctx.save_for_backward(x, weight, inverse)
        return (wide * inverse).mul_(weight + norm.offset).to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        norm = ctx.norm
        normal = precise(x) * inverse
        dy = precise(dy)
        to_weight = (dy * normal).flatten(0, -2).sum(0).to(weight.dtype)
        to_normal = dy * (weight + norm.offset)
        mean = norm.sum_over_ranks((to_normal * normal).sum(-1, keepdim=True)) / norm.whole_size
        return to_normal.addcmul_(normal, mean, value=-1).mul_(inverse).to(x.dtype), to_weight, None


@torch.compiler.disable
def _normalise_heads(x: Tensor, weight: Tensor, norm: NormOverHeads) -> Tensor:
    return _NormOverHeads.apply(x, weight, norm)


class LayerNorm(nn.LayerNorm):
    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        return F.layer_norm(x, self.normalized_shape, weight, self.bias, self.eps)


def make_norm(model: DecoderModel, size: int, *, over_heads: bool = False) -> RMSNorm | LayerNorm:
    """Return a norm of the model's kind for rows of `size` elements; `over_heads`: they are all heads together."""
    norm: RMSNorm | LayerNorm
    if model.norm == "rms":
        norm = (NormOverHeads if over_heads else RMSNorm)(size, eps=model.norm_eps)
    else:
        norm = LayerNorm(size, eps=model.norm_eps, bias=model.norm_bias)
    norm.offset = 1.0 if model.norm_offset else 0.0
    return norm


def precise(x: Tensor) -> Tensor:
    """Convert to fp32, but keep fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
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

    def __init__(self, hidden_size: int, ffn_size: int, *, gated: bool, activation: Activation, bias: bool = False):
        """With `bias`, the owner adds the bias of `down`."""
        super().__init__(activation)
        self.gate = nn.Linear(hidden_size, ffn_size, bias=bias) if gated else None
        self.up = nn.Linear(hidden_size, ffn_size, bias=bias)
        self.down = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate = None if self.gate is None else self.gate(x_BSD)
        up = self.up(x_BSD)
        return self.down(self.activate(gate, up))


class BatchNorm(nn.Module):
    """Batch normalisation: uses the batch's statistics in training, and their running means in evaluation
    (arXiv:1502.03167).

    In every layout, the statistics equal those of a single process that runs all ranks' micro-batches. They are
    computed in at least fp32. Shapes: B samples, C channels, then the spatial dimensions.
    """

    momentum = 0.1
    running_mean: Tensor
    running_variance: Tensor

    def __init__(self, channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.sum_over_ranks: Callable[[Tensor], Tensor] = lambda x: x
        """Sums in place over all ranks that hold parts of a micro-batch; parts may have any size. Set externally."""
        self.seen: list[tuple[Tensor, Tensor, Tensor]] = []
        """Mean (C,), variance (C,) and number of values per channel (scalar) of each micro-batch whose backward has
        run. The backward adds them, because it runs only once even with recomputation; `update_statistics` uses
        them."""
        self.weight = nn.Parameter(torch.empty(channels))
        self.bias = nn.Parameter(torch.empty(channels))
        self.register_buffer("running_mean", torch.empty(channels))
        self.register_buffer("running_variance", torch.empty(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return _normalise(x, self.weight, self.bias, self)
        scale = precise(self.weight) * (self.running_variance + self.eps).rsqrt()
        return _scale(x, scale, precise(self.bias) - self.running_mean * scale)


def update_statistics(norms: Sequence[BatchNorm]) -> None:
    """Update the running statistics with those of the micro-batches since the last update.

    All norms are updated together: with separate kernels, each norm would wait longer for their launches than for their
    work.
    """
    running = [norm.running_mean for norm in norms] + [norm.running_variance for norm in norms]
    for seen in zip(*(norm.seen for norm in norms), strict=True):
        means, variances, counts_of_norms = zip(*seen, strict=True)
        counts = torch.stack(counts_of_norms)
        new = torch.cat([*means, *variances])
        # The running variance is unbiased. Non-finite statistics are excluded, because they would persist forever.
        factors = (counts / (counts - 1).clamp(min=1)).unbind()
        spread = [factor.expand(len(mean)) for factor, mean in zip(factors, means, strict=True)]
        new[len(new) // 2 :].mul_(torch.cat(spread))
        old = torch.cat(running)
        kept = torch.where(new.abs() < torch.inf, new.to(old.dtype), old)
        torch._foreach_lerp_(running, kept.split([len(one) for one in running]), BatchNorm.momentum)
    forget_statistics(norms)


def forget_statistics(norms: Sequence[BatchNorm]) -> None:
    """Discard the statistics of micro-batches that are being repeated."""
    for norm in norms:
        norm.seen.clear()


class _BatchNorm(torch.autograd.Function):
    """Batch normalisation with elementary operations, for any device and with the same bits in every layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        own = _channel_sum(x)
        totals = norm.sum_over_ranks(torch.cat([own, own.new_full((1,), x.numel() // x.shape[1])]))
        mean = totals[:-1] / totals[-1]
        count = totals[-1]
        variance = norm.sum_over_ranks(_channel_sum((precise(x) - along_channels(mean, x)).square_())) / count
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
        normal = (precise(x) - along_channels(mean, x)).mul_(along_channels(inverse_std, x))
        gradient = precise(gradient)
        to_bias = _channel_sum(gradient)
        to_weight = _channel_sum(gradient * normal)
        both = norm.sum_over_ranks(torch.stack([to_bias, to_weight])) / count
        to_x = gradient - along_channels(both[0], x) - normal.mul_(along_channels(both[1], x))
        to_x *= along_channels(precise(weight) * inverse_std, x)
        norm.seen.append((mean, variance, count))
        return to_x.to(x.dtype), to_weight.to(weight.dtype), to_bias.to(weight.dtype), None


class _FusedBatchNorm(torch.autograd.Function):
    """The same with the kernels of torch's SyncBatchNorm: two per direction that read x in its own format, and one
    exchange per direction.

    SyncBatchNorm gathers the statistics of each rank. Here, ranks sum their moments, so the exchange does not grow with
    the number of ranks, and ranks without samples need no special case. In fp64, the variance is not lost to
    cancellation when the mean is far from 0.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
        channels = x.shape[1]
        number = x.numel() // channels
        totals = x.new_full((2 * channels + 1,), number, dtype=torch.float64)
        first, second, count = totals.split([channels, channels, 1])
        if number:
            own_mean, own_variance = torch.batch_norm_update_stats(x, None, None, 0.0)
            first.mul_(own_mean)
            second.mul_(own_variance).addcmul_(first, own_mean)
        norm.sum_over_ranks(totals)
        mean, square = (totals[:-1] / count).chunk(2)
        variance = square.addcmul(mean, mean, value=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        rounded_mean = mean.to(wide)
        inverse_std = (variance + norm.eps).rsqrt().to(wide)
        ctx.norm = norm
        ctx.seen = mean, variance, count[0]
        ctx.save_for_backward(x, weight, rounded_mean, inverse_std)
        if not number:
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, weight, bias, rounded_mean, inverse_std, norm.eps)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, mean, inverse_std = ctx.saved_tensors
        norm = ctx.norm
        norm.seen.append(ctx.seen)
        if not x.numel():
            norm.sum_over_ranks(inverse_std.new_zeros(2 * x.shape[1]))
            nothing = torch.zeros_like(weight)
            return torch.empty_like(x), nothing, nothing, None
        to_bias, to_mean, to_weight, _ = torch.batch_norm_backward_reduce(
            gradient, x, mean, inverse_std, weight, True, True, False
        )
        both = norm.sum_over_ranks(torch.cat([to_bias, to_mean])).div_(ctx.seen[-1])
        all_to_bias, all_to_mean = both.chunk(2)
        # The kernel divides by an int32, which a large batch overflows.
        one = torch.ones(1, dtype=torch.int32, device=x.device)
        to_x = torch.batch_norm_backward_elemt(
            gradient, x, mean, inverse_std, weight.to(mean.dtype), all_to_bias, all_to_mean, one
        )
        return to_x, to_weight, to_bias.to(weight.dtype), None


@torch.compiler.disable
def _normalise(x: Tensor, weight: Tensor, bias: Tensor, norm: BatchNorm) -> Tensor:
    kernels = _FusedBatchNorm if KINDS[x.device.type].has_norm_kernels else _BatchNorm
    return kernels.apply(x, weight, bias, norm)


def _scale(x: Tensor, scale_C: Tensor, shift_C: Tensor) -> Tensor:
    """Scale and shift in fp32, and round once to the format of x."""
    return torch.addcmul(along_channels(shift_C, x), precise(x), along_channels(scale_C, x)).to(x.dtype)


def _channel_sum(x: Tensor) -> Tensor:
    """Return the sum (C,) of (B, C, ...), in at least fp32."""
    return x.sum(dim=all_but_channels(x), dtype=torch.promote_types(x.dtype, torch.float32))


def all_but_channels(x: Tensor) -> list[int]:
    """Return the dimensions of x (B, C, ...) other than C."""
    return [0, *range(2, x.dim())]


def along_channels(values_C: Tensor, x: Tensor) -> Tensor:
    """Reshape (C,) to broadcast over x (B, C, ...)."""
    return values_C.view(1, -1, *(1 for _ in x.shape[2:]))
