import math
from functools import partial

import pytest
import torch

from trainspec_cli.engine.optim.optimizer import build_optimizer, guarded_update, squared_norm
from trainspec_cli.engine.shares import Share
from trainspec_cli.recipe.keys.training import OptimSpec


def model_with_gradients(scale: float = 1.0) -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn_like(parameter)
    return model


def shares_of(model) -> list[Share]:
    return [Share(name, parameter) for name, parameter in model.named_parameters()]


def norm_of(shares) -> torch.Tensor:
    return squared_norm(shares).sqrt().float()


def values(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("scale", [10.0, 0.01], ids=["clipped", "below the norm"])
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_clipping_equals_torchs_own(name, scale):
    spec = OptimSpec(lr=0.1, name=name, weight_decay=0.0)
    ours, theirs = model_with_gradients(scale), model_with_gradients(scale)
    shares = shares_of(ours)
    guarded_update(build_optimizer(shares, spec), shares, norm_of(shares), torch.tensor(1.0), 1.0)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    reference = {
        "sgd": torch.optim.SGD,
        "adamw": partial(torch.optim.AdamW, betas=(spec.beta1, spec.beta2), eps=spec.eps),
    }
    reference[name](theirs.parameters(), lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(values(ours), values(theirs), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_nothing_moves_when_something_is_not_finite(where, bad):
    model = model_with_gradients()
    shares = shares_of(model)
    optimizer = build_optimizer(shares, OptimSpec(lr=0.1))
    if where == "gradient":
        next(model.parameters()).grad[0, 0] = bad
    before = values(model).clone()
    loss = torch.tensor(bad if where == "loss" else 1.0)
    assert guarded_update(optimizer, shares, norm_of(shares), loss, 1.0) == 1
    assert torch.equal(values(model), before)
    assert all(state["step"] == 0 for state in optimizer.state.values())

    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    assert guarded_update(optimizer, shares, norm_of(shares), torch.tensor(1.0), 1.0) == 0
    assert not torch.equal(values(model), before)
    assert values(model).isfinite().all()


def test_only_matrices_decay():
    model = model_with_gradients(0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shares = shares_of(model)
    optimizer = build_optimizer(shares, OptimSpec(lr=0.1, weight_decay=0.5))
    guarded_update(optimizer, shares, torch.tensor(0.0), torch.tensor(1.0), None)
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.dim() > 1 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("loss", [1.0, math.nan], ids=["made", "skipped"])
def test_an_update_leaves_no_gradient_to_be_added_to(loss):
    model = model_with_gradients()
    shares = shares_of(model)
    optimizer = build_optimizer(shares, OptimSpec(lr=0.1))
    guarded_update(optimizer, shares, norm_of(shares), torch.tensor(loss), 1.0)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(share.local.grad is None for share in shares)
