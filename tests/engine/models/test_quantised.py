"""A layer with a quantised weight against the same layer with that weight in full."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from trainspec_cli.engine.models.lora import LoraLinear, QuantisedLoraLinear
from trainspec_cli.engine.models.quantised import QuantisedLinear
from trainspec_cli.engine.nf4 import quantise
from trainspec_cli.engine.shares import TENSORS, restore
from trainspec_cli.recipe.keys.training import LoraSpec

SPEC = LoraSpec(rank=4, base="nf4")


def pair(dtype: torch.dtype) -> tuple[QuantisedLoraLinear, LoraLinear]:
    """Return a quantised layer with a bias, and its twin whose weight is the dequantised one."""
    torch.manual_seed(0)
    linear = nn.Linear(160, 96, device="meta")
    layers = QuantisedLoraLinear(linear, SPEC).to_empty(device="cpu"), LoraLinear(linear, SPEC).to_empty(device="cpu")
    held = quantise(torch.randn(96, 160))
    ours, full = layers
    ours.init_buffers()
    with torch.no_grad():
        for name, tensor in zip(TENSORS, held, strict=True):
            getattr(ours, name).copy_(tensor)
        full.weight.copy_(restore(held))
        ours.bias = nn.Parameter(torch.randn(96))
        full.bias = nn.Parameter(ours.bias.detach().clone())
        for name in ("lora_a", "lora_b"):
            setattr(ours, name, nn.Parameter(torch.randn_like(getattr(ours, name)).to(dtype)))
            setattr(full, name, nn.Parameter(getattr(ours, name).detach().clone()))
    for layer in layers:
        layer.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    full.weight = nn.Parameter(full.weight.to(dtype), requires_grad=False)
    return ours, full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_is_to_the_bit_that_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    found: list[list[Tensor]] = []
    for layer in pair(dtype):
        x = torch.randn(2, 7, 160, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
        y = layer(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        assert x.grad is not None and layer.lora_a.grad is not None and layer.lora_b.grad is not None
        found.append([y.detach(), x.grad, layer.lora_a.grad, layer.lora_b.grad])
    assert all(ours.equal(full) for ours, full in zip(*found, strict=True))


def test_what_is_kept_for_the_backward_is_the_four_bits() -> None:
    layer, _ = pair(torch.float32)
    buffers = {buffer.data_ptr() for buffer in layer.buffers()}
    saved: list[Tensor] = []

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(3, 160, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        QuantisedLinear.forward(layer, x)
    assert len(saved) == 5 and {tensor.data_ptr() for tensor in saved} == buffers
