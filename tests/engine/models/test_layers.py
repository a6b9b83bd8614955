"""Feed-forward layers against their formulas."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from trainspec_cli.engine.models.layers import FeedForward, GatedActivation
from trainspec_cli.recipe.keys.model import Activation

FORMULAS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_activation_is_that_of_the_gate_or_without_one_of_the_whole(activation: Activation, gated: bool) -> None:
    torch.manual_seed(0)
    layer = FeedForward(6, 10, gated=gated, activation=activation).double()
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    up, act = layer.up(x), FORMULAS[activation]
    inner = act(layer.gate(x)) * up if layer.gate is not None else act(up)
    torch.testing.assert_close(layer(x), layer.down(inner))


def test_a_clamped_gate_is_cut_above_alone_and_its_other_half_on_both_sides() -> None:
    gate, up = torch.tensor([-9.0, 9.0, 1.0]), torch.tensor([-9.0, 9.0, 0.5])
    cut_gate, cut_up = torch.tensor([-9.0, 7.0, 1.0]), torch.tensor([-7.0, 7.0, 0.5])
    expected = cut_gate / (1 + torch.exp(-1.702 * cut_gate)) * (cut_up + 1)
    torch.testing.assert_close(GatedActivation("silu", 7.0).activate(gate, up), expected)
