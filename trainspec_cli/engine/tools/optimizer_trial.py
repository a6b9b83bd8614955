"""AdamW as a run uses it: the update of parameters of its shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trainspec_cli.engine.optim.build import build_optimizer
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.tools.kernel_trial import Kernel, Work, Workload, relative_error
from trainspec_cli.spec.recipe.optim import OptimSpec

MEASURED_ELEMENTS, CHECKED_ELEMENTS = 2**26, 2**20
"""Parameters that are updated at most: more take as long each."""
CHECKED_STEPS, GRAD_SCALE = 3, 2.0
WEIGHT_STD = 0.02

Shape = tuple[int, ...]


def optimizer_update(parameters: Mapping[Shape, int], optim: OptimSpec, device: torch.device) -> Workload:
    """Shapes of parameters with their numbers; kept in fp32, whatever the run computes in."""
    few, many = _as_many(parameters, CHECKED_ELEMENTS), _as_many(parameters, MEASURED_ELEMENTS)
    shares = make_shares(many, torch.float32, device)

    def works_of(kernel: Kernel) -> list[tuple[Work, int]]:
        """All have the same parameters and moments of the same layout."""
        return [(build_optimizer(shares, optim, kernel).step, 1)]

    return Workload(torch.float32, device, lambda kernel: update_error(kernel, few, optim, device), works_of)


def update_error(kernel: Kernel, shapes: Sequence[Shape], optim: OptimSpec, device: torch.device) -> float:
    """Of parameters after some guarded steps, against the update as it is written (arXiv:1711.05101, algorithm 2)."""
    shares, expected = (make_shares(shapes, dtype, device) for dtype in (torch.float32, torch.float64))
    optimizer: Any = build_optimizer(shares, optim, kernel)
    for _ in range(CHECKED_STEPS):
        gradients = [share.local.grad.clone() for share in shares]  # type: ignore[union-attr]
        optimizer.grad_scale = torch.tensor(GRAD_SCALE, device=device)
        optimizer.found_inf = torch.tensor(0.0, device=device)
        optimizer.step()
        for share, gradient in zip(shares, gradients, strict=True):
            share.local.grad = gradient
    written = [_written_out(share.local, optim) for share in expected]
    return max(relative_error(share.local.detach(), one) for share, one in zip(shares, written, strict=True))


def _written_out(parameter: Tensor, optim: OptimSpec) -> Tensor:
    gradient, weight = parameter.grad / GRAD_SCALE, parameter.detach().clone()  # type: ignore[operator]
    first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    decay = optim.weight_decay if weight.dim() > 1 else 0.0
    for step in range(1, CHECKED_STEPS + 1):
        first = optim.beta1 * first + (1 - optim.beta1) * gradient
        second = optim.beta2 * second + (1 - optim.beta2) * gradient**2
        root = (second / (1 - optim.beta2**step)).sqrt() + optim.eps
        weight = weight - optim.lr * (decay * weight + first / (1 - optim.beta1**step) / root)
    return weight


def make_shares(shapes: Sequence[Shape], dtype: torch.dtype, device: torch.device) -> list[Share]:
    """The same numbers in every format, gradients as well."""
    generator = torch.Generator(device).manual_seed(0)
    shares = []
    for number, shape in enumerate(shapes):
        weight, gradient = (torch.randn(shape, generator=generator, device=device) * WEIGHT_STD for _ in range(2))
        share = Share(str(number), nn.Parameter(weight.to(dtype)))
        share.local.grad = gradient.to(dtype)
        shares.append(share)
    return shares


def _as_many(parameters: Mapping[Shape, int], elements: int) -> list[Shape]:
    """Shapes in turn, one of each kind first, until there are so many elements; one at least."""
    left, chosen = dict(parameters), []
    while elements > 0 and any(left.values()):
        for shape in [shape for shape, count in left.items() if count]:
            if elements > 0:
                chosen.append(shape)
                left[shape] -= 1
                elements -= torch.Size(shape).numel()
    return chosen
