"""The blockwise scan against the recurrence, token by token, in fp64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.models.mamba2 import selective_scan
from trainspec_cli.planner.workload.ssm import scan_gemms
from trainspec_cli.recipe.keys.model import HybridModel


def recurrence(x, dt, a, b, c):
    """h_t = exp(dt a) h_(t-1) + dt x b^T; y_t = h_t c_t."""
    heads, groups = x.shape[2], b.shape[2]
    b, c = (tensor.repeat_interleave(heads // groups, dim=2) for tensor in (b, c))
    state = x.new_zeros(x.shape[0], heads, x.shape[3], b.shape[3])
    outputs = []
    for t in range(x.shape[1]):
        decay = (dt[:, t] * a).exp()[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * b[:, t, :, None]
        outputs.append((state * c[:, t, :, None]).sum(-1))
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("block", [1, 3, 4, 8, 13, 32])
def test_scan_equals_the_recurrence(block) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 13, 6, 4), "dt": (2, 13, 6), "a": (6,), "b": (2, 13, 2, 5), "c": (2, 13, 2, 5)}
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes.values()]
    inputs[1], inputs[2] = inputs[1].exp(), -inputs[2].exp()
    for tensor in inputs:
        tensor.requires_grad_()
    found, expected = selective_scan(*inputs, block), recurrence(*inputs)
    torch.testing.assert_close(found, expected)
    weight = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    found_gradients = torch.autograd.grad((found * weight).sum(), inputs)
    for found_gradient, gradient in zip(
        found_gradients, torch.autograd.grad((expected * weight).sum(), inputs), strict=True
    ):
        torch.testing.assert_close(found_gradient, gradient)


def test_strong_decays_over_many_blocks_lose_no_digits() -> None:
    """Sums of decays reach tens of thousands; what survives is what lies near."""
    generator = torch.Generator().manual_seed(0)
    x, b, c = (torch.randn(1, 512, heads, 4, generator=generator) for heads in (2, 1, 1))
    dt = torch.rand(1, 512, 2, generator=generator) * (torch.arange(512) % 64 < 40)[None, :, None]
    a = torch.tensor([-100.0, -0.01])
    inputs = [tensor.requires_grad_() for tensor in (x, dt, a, b, c)]
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    found, expected = selective_scan(*inputs, 64), recurrence(*exact)
    assert float((found - expected).detach().norm() / expected.detach().norm()) < 1e-5
    found_gradients = torch.autograd.grad(found.sum(), inputs)
    for gradient, wanted in zip(found_gradients, torch.autograd.grad(expected.sum(), exact), strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-4


class Products(TorchDispatchMode):
    """Collects the products of batches of matrices: (batch, sorted rows and columns, inner dimension, is in fp32)."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[object, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.bmm:
            (batch, rows, inner), columns = args[0].shape, args[1].shape[2]
            self.found.append((batch, tuple(sorted((rows, columns))), inner, args[0].dtype == torch.float32))
        return func(*args, **(kwargs or {}))


def test_the_planner_counts_the_products_of_the_scan() -> None:
    """300 tokens are 3 blocks."""
    model = HybridModel(
        hidden_size=8, vocab_size=16, mamba_layers=1, mamba_head_dim=4, mamba_state_size=5, mamba_groups=2
    )
    heads = model.mamba_heads
    shapes = [(2, 300, heads, 4), (2, 300, heads), (heads,), (2, 300, 2, 5), (2, 300, 2, 5)]
    wide = [torch.float32 if place in (1, 2) else torch.bfloat16 for place in range(5)]
    with Products() as made:
        selective_scan(
            *(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, wide, strict=True))
        )
    planned = scan_gemms(model, tokens=600.0, seq_len=300, tp=1)
    assert [(one.count, tuple(sorted((one.m, one.n))), one.k, one.precise) for one in planned] == made.found
