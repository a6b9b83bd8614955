"""The kernels of torch's SyncBatchNorm, which torch does not have for a CPU, from elementary operations.

Each stands for one kernel, whose time follows from its arguments and results (costs.py). Shapes: (B, C, ...).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainspec_cli.engine.models.layers import precise


def _statistics(x: Tensor, _running_mean: None, _running_variance: None, _momentum: float) -> tuple[Tensor, Tensor]:
    variance_C, mean_C = torch.var_mean(precise(x), _others(x), correction=0)
    return mean_C, variance_C


def _normalise(
    x: Tensor, weight_C: Tensor, bias_C: Tensor, mean_C: Tensor, inverse_std_C: Tensor, _eps: float
) -> Tensor:
    normal = (precise(x) - _along(mean_C, x)) * _along(inverse_std_C, x)
    return (normal * _along(weight_C, x) + _along(bias_C, x)).to(x.dtype)


def _sum_gradients(
    gradient: Tensor, x: Tensor, mean_C: Tensor, inverse_std_C: Tensor, weight_C: Tensor, *_needed: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gradient = precise(gradient)
    to_bias_C = gradient.sum(_others(x))
    to_mean_C = (gradient * (precise(x) - _along(mean_C, x))).sum(_others(x))
    to_weight_C = (to_mean_C * inverse_std_C).to(weight_C.dtype)
    return to_bias_C, to_mean_C, to_weight_C, to_bias_C.to(weight_C.dtype, copy=True)


def _differentiate(
    gradient: Tensor, x: Tensor, mean_C: Tensor, inverse_std_C: Tensor, weight_C: Tensor, to_bias_C: Tensor,
    to_mean_C: Tensor, counts: Tensor,
) -> Tensor:  # fmt: skip
    count = counts.sum()
    along_x_C = to_mean_C / count * inverse_std_C.square()
    rest = precise(gradient) - _along(to_bias_C / count, x) - (precise(x) - _along(mean_C, x)) * _along(along_x_C, x)
    return (rest * _along(weight_C * inverse_std_C, x)).to(x.dtype)


def _others(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(values_C: Tensor, x: Tensor) -> Tensor:
    return values_C.view(1, -1, *(1 for _ in x.shape[2:]))


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
