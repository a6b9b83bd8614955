"""Muon against torch's own, update for update, and what it leaves to AdamW."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainspec_cli.engine.optim.muon import STEPS, Muon, is_hidden_matrix, orthogonalise
from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update, set_learning_rate
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec

SPEC = OptimSpec(name="muon", lr=0.03, momentum=0.8, weight_decay=0.2, beta1=0.7, beta2=0.8, eps=0.05)
SHAPES = {
    "blocks.0.q.weight": (24, 40),
    "blocks.0.up.weight": (40, 24),
    "blocks.1.q.weight": (24, 40),
    "blocks.1.gate.weight": (16, 16),
}


def drawn(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_shares(shapes: dict[str, tuple[int, ...]]) -> list[Share]:
    return [Share(name, torch.nn.Parameter(drawn(place, shape))) for place, (name, shape) in enumerate(shapes.items())]


@pytest.mark.parametrize(("compute", "rtol"), [(torch.bfloat16, 1e-6), (None, 3e-2)], ids=["bf16", "fp32"])
def test_three_steps_are_torchs(compute: torch.dtype | None, rtol: float) -> None:
    """The rate changes, and gradients are clipped to half; torch computes in bf16 on a CPU too."""
    shares = make_shares(SHAPES)
    theirs = [share.parameter.detach().clone().requires_grad_() for share in shares]
    optimizer = build_optimizer(shares, SPEC)
    assert isinstance(optimizer, Muon)
    optimizer.compute = compute
    reference = torch.optim.Muon(
        theirs, lr=0.03, weight_decay=0.2, momentum=0.8, nesterov=True, adjust_lr_fn="match_rms_adamw"
    )
    for step, lr in enumerate((0.03, 0.01, 0.05)):
        set_learning_rate(optimizer, lr)
        reference.param_groups[0]["lr"] = lr
        for place, (share, other) in enumerate(zip(shares, theirs, strict=True)):
            gradient = drawn(100 * step + place, tuple(other.shape))
            share.parameter.grad, other.grad = gradient, gradient / 2
        assert guarded_update(optimizer, shares, torch.tensor(2.0), torch.tensor(1.0), 1.0) == 0
        reference.step()
    for share, other in zip(shares, theirs, strict=True):
        assert (share.local - other).norm() <= rtol * other.norm()


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_singular_values_come_near_to_one(shape: tuple[int, int]) -> None:
    matrix = drawn(3, shape)
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonalise(matrix)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6 and values.max() < 1.25
    assert (found * (u @ v)).sum() / (found.norm() * (u @ v).norm()) > 0.97


def test_stacked_matrices_are_orthogonalised_each() -> None:
    stack = torch.stack([drawn(number, (12, 20)) for number in range(3)])
    torch.testing.assert_close(orthogonalise(stack), torch.stack([orthogonalise(one) for one in stack]))


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float32])
def test_matrices_of_one_shape_are_one_product_in_the_format_of_the_run(compute: torch.dtype) -> None:
    products: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func.__name__.startswith(("addmm", "baddbmm")):
                products.append(result)
            return result

    shares = make_shares({f"blocks.{layer}.{name}.weight": (24, 40) for layer in range(3) for name in ("q", "k")})
    optimizer = build_optimizer(shares, SPEC, compute=compute)
    for share in shares:
        share.parameter.grad = drawn(7, (24, 40))
    with Watch():
        guarded_update(optimizer, shares, torch.tensor(1.0), torch.tensor(1.0), None)
    assert len(products) == 2 * STEPS
    assert {product.dtype for product in products} == {compute}
    assert {len(product) for product in products} == {len(shares)}


def test_an_update_is_as_large_as_adamws_usually_is() -> None:
    """Root mean square 0.2 of the rate (arXiv:2502.16982, section 2.2), whatever the shape."""
    shares = make_shares({"blocks.0.q.weight": (64, 16), "blocks.0.k.weight": (32, 128)})
    before = [share.local.detach().clone() for share in shares]
    optimizer = build_optimizer(shares, replace(SPEC, weight_decay=0.0))
    for share in shares:
        share.parameter.grad = drawn(7, tuple(share.parameter.shape))
    guarded_update(optimizer, shares, torch.tensor(1.0), torch.tensor(1.0), None)
    for share, old in zip(shares, before, strict=True):
        assert (share.local - old).square().mean().sqrt() == pytest.approx(0.2 * 0.03, rel=0.25)


def test_all_else_is_left_to_adamw() -> None:
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (50, 16),
        "head.weight": (50, 16),
        "norm.weight": (16,),
        "blocks.0.norm.weight": (16,),
        "blocks.0.mixer.conv_x.weight": (32, 4),
        "blocks.0.experts.up_bias": (4, 16),
    }
    ours, theirs = make_shares(shapes), make_shares(shapes)
    assert not any(map(is_hidden_matrix, ours))
    optimizers = build_optimizer(ours, SPEC), build_optimizer(theirs, replace(SPEC, name="adamw"))
    for step in range(3):
        for shares, optimizer in zip((ours, theirs), optimizers, strict=True):
            for share in shares:
                share.parameter.grad = drawn(step, tuple(share.parameter.shape))
            guarded_update(optimizer, shares, torch.tensor(3.0), torch.tensor(1.0), 1.0)
    assert all(torch.equal(own.local, other.local) for own, other in zip(ours, theirs, strict=True))


def test_experts_are_matrices() -> None:
    (share,) = make_shares({"blocks.0.mixture.experts.up": (3, 8, 20)})
    optimizer = build_optimizer([share], replace(SPEC, weight_decay=0.0, momentum=0.0))
    before, gradient = share.local.detach().clone(), drawn(1, (3, 8, 20))
    share.parameter.grad = gradient.clone()
    guarded_update(optimizer, [share], torch.tensor(1.0), torch.tensor(1.0), None)
    for expert in range(3):
        expected = before[expert] - 0.03 * 0.2 * math.sqrt(20) * orthogonalise(gradient[expert])
        torch.testing.assert_close(share.local[expert], expected)
