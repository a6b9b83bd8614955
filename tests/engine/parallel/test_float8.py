"""Linear layers in fp8 against the same ones in fp64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trainspec_cli.engine.models.layers import FeedForward
from trainspec_cli.engine.parallel.expert import apply_float8

E4M3_HALF_STEP = 2.0**-4
"""Three bits of mantissa: a number is at most so far from its rounded self, relative to it."""


@pytest.fixture
def pair() -> tuple[nn.Module, nn.Module]:
    """(in fp64, the same weights in fp8)"""
    torch.manual_seed(0)
    exact = FeedForward(64, 128, gated=True, activation="silu").double()
    rounded = copy.deepcopy(exact).float()
    apply_float8([rounded], emulate=True)
    return exact, rounded


def relative(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def test_parameters_keep_their_names_and_values(pair):
    exact, rounded = pair
    wanted = dict(exact.named_parameters())
    assert [name for name, _ in rounded.named_parameters()] == list(wanted)
    assert all(torch.equal(parameter, wanted[name].float()) for name, parameter in rounded.named_parameters())


def test_products_and_gradients_are_as_far_off_as_the_format(pair):
    exact, rounded = pair
    x = torch.randn(4, 16, 64, dtype=torch.float64)
    ours, theirs = rounded(x.float()), exact(x)
    assert 1e-3 < relative(ours, theirs) < E4M3_HALF_STEP, "rounded, and no more than that"
    ours.square().sum().backward()
    theirs.square().sum().backward()
    for (name, got), wanted in zip(rounded.named_parameters(), exact.parameters(), strict=True):
        assert 1e-3 < relative(got.grad, wanted.grad) < 4 * E4M3_HALF_STEP, name
