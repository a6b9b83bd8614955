"""What a spec's optimizer does, against torch's own over several steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update, set_learning_rate, squared_norm
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec

SPEC = OptimSpec(lr=0.03, beta1=0.7, beta2=0.8, eps=0.05, weight_decay=0.2)


def parameters() -> list[torch.nn.Parameter]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=drawn)) for shape in ((4, 3), (5,), (2, 2, 2), ())]


def gradients(step: int) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(10 + step)
    return [torch.randn(parameter.shape, generator=drawn) for parameter in parameters()]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_three_steps_are_torchs(name: Any) -> None:
    """With every number away from its default; only what has two dims or more decays; the rate changes."""
    from dataclasses import replace

    spec = replace(SPEC, name=name)
    ours, theirs = parameters(), parameters()
    shares = [Share(str(number), parameter) for number, parameter in enumerate(ours)]
    optimizer = build_optimizer(shares, spec)
    groups = [
        {"params": [p for p in theirs if p.dim() > 1], "weight_decay": 0.2},
        {"params": [p for p in theirs if p.dim() <= 1], "weight_decay": 0.0},
    ]
    reference: Any = torch.optim.AdamW(groups, lr=0.03, betas=(0.7, 0.8), eps=0.05)
    if name == "sgd":
        reference = torch.optim.SGD(groups, lr=0.03)
    for step, lr in enumerate((0.03, 0.01, 0.05)):
        set_learning_rate(optimizer, lr)
        for group in reference.param_groups:
            group["lr"] = lr
        for own, other, gradient in zip(ours, theirs, gradients(step), strict=True):
            own.grad, other.grad = gradient.clone(), gradient.clone()
        assert guarded_update(optimizer, shares, torch.tensor(1.0), torch.tensor(1.0), None) == 0
        reference.step()
    torch.testing.assert_close([p.detach() for p in ours], [p.detach() for p in theirs], rtol=1e-5, atol=1e-6)


def test_moments_stand_before_the_first_step() -> None:
    """A checkpoint is loaded into them."""
    shares = [Share(str(number), parameter) for number, parameter in enumerate(parameters())]
    optimizer = build_optimizer(shares, SPEC)
    assert len(optimizer.state) == len(shares)
    for share in shares:
        state = optimizer.state[share.local]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["step"].shape == () and not state["step"]
        for moment in ("exp_avg", "exp_avg_sq"):
            assert state[moment].shape == share.local.shape and not state[moment].any()


@pytest.mark.parametrize("dims", [1, 2])
def test_a_group_without_parameters_is_left_out(dims: int) -> None:
    optimizer = build_optimizer([Share("p", torch.nn.Parameter(torch.ones([2] * dims)))], SPEC)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2 if dims > 1 else 0.0]


def test_a_part_that_several_ranks_hold_counts_once_in_the_sum_over_ranks() -> None:
    shares = [Share(str(copies), torch.nn.Parameter(torch.zeros(2)), copies=copies) for copies in (1, 4, 4, 2)]
    for share, value in zip(shares, (1.0, 2.0, 3.0, 5.0), strict=True):
        share.parameter.grad = torch.full((2,), value)
    shares.append(Share("frozen", torch.nn.Parameter(torch.zeros(2))))
    found = squared_norm(shares)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(2 * (1 + (4 + 9) / 4 + 25 / 2))


@pytest.mark.parametrize(("norm", "divisor"), [(6.0, 3.0), (2.0, 1.0), (0.5, 1.0)])
def test_gradients_are_divided_where_the_norm_is_above_the_limit(norm: float, divisor: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    share = Share("p", parameter)
    optimizer = build_optimizer([share], OptimSpec(lr=1.0, name="sgd"))
    parameter.grad = torch.tensor([3.0, -6.0, 9.0])
    guarded_update(optimizer, [share], torch.tensor(norm), torch.tensor(1.0), 2.0)
    assert parameter.detach().tolist() == pytest.approx([-3.0 / divisor, 6.0 / divisor, -9.0 / divisor])
