"""The blockwise scan against the recurrence, token by token, in fp64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from trainspec_cli.engine.models.mamba2 import selective_scan


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
