"""The kernels of torch's SyncBatchNorm, which torch does not have for a CPU, from elementary operations.

Each stands for one kernel, whose time follows from its arguments and results (costs.py). Shapes: (B, C, ...) for x and
its gradient, (C,) for statistics and weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.models.layers import all_but_channels, along_channels, precise


def _statistics(x: Tensor, _running_mean: None, _running_variance: None, _momentum: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(precise(x), all_but_channels(x), correction=0)
    return mean, variance


def _normalise(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, inverse_std: Tensor, _eps: float) -> Tensor:
    normal = (precise(x) - along_channels(mean, x)) * along_channels(inverse_std, x)
    return (normal * along_channels(weight, x) + along_channels(bias, x)).to(x.dtype)


def _sum_gradients(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, *_needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = precise(gradient)
    to_bias = gradient.sum(all_but_channels(x))
    to_mean = (gradient * (precise(x) - along_channels(mean, x))).sum(all_but_channels(x))
    to_weight = (to_mean * inverse_std).to(weight.dtype)
    return to_bias, to_mean, to_weight, to_bias.to(weight.dtype, copy=True)


def _differentiate(
    gradient: Tensor, x: Tensor, mean: Tensor, inverse_std: Tensor, weight: Tensor, to_bias: Tensor,
    to_mean: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    count = counts.sum()
    along_x = to_mean / count * inverse_std.square()
    rest = (
        precise(gradient)
        - along_channels(to_bias / count, x)
        - (precise(x) - along_channels(mean, x)) * along_channels(along_x, x)
    )
    return (rest * along_channels(weight * inverse_std, x)).to(x.dtype)


KERNELS: dict[str, Callable[..., Any]] = {
    "batch_norm_update_stats": _statistics,
    "batch_norm_elemt": _normalise,
    "batch_norm_backward_reduce": _sum_gradients,
    "batch_norm_backward_elemt": _differentiate,
}
"""torch's name of the kernel -> its implementation."""


def register(aten: torch.library.Library) -> None:
    """Make the kernels available for tensors on the host and for tensors without memory."""
    with warnings.catch_warnings():
        # torch warns that this replaces the CPU's own statistics, which are in bf16 for tensors in bf16.
        warnings.simplefilter("ignore", UserWarning)
        for name, kernel in KERNELS.items():
            for place in ("CPU", "Meta"):
                aten.impl(name, kernel, place)  # type: ignore[no-untyped-call]
