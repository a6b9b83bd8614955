"""Adapters: what they add, and that they alone learn; and a quantised layer against the same layer in full."""

import pytest
import torch
from torch import Tensor, nn

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.language_model import PublishedModel
from trainspec_cli.engine.models.lora import LoraLinear, QuantisedLinear, QuantisedLoraLinear, apply_lora
from trainspec_cli.engine.nf4 import quantise
from trainspec_cli.engine.shares import TENSORS, restore
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import LoraSpec

MODEL = DecoderModel(2, 32, 4, 2, 8, 48, 61, tied_embeddings=True)
TOKENS = torch.arange(12)[None]
QUANTISED = LoraSpec(rank=4, base="nf4")


def adapted(spec):
    with torch.device("meta"):
        model = build_model(MODEL, 24)
        apply_lora(model, spec)
    model.to_empty(device="cpu")
    for number, (name, parameter) in enumerate(model.named_parameters()):
        with torch.no_grad():
            model.init_parameter(name, parameter, torch.Generator().manual_seed(number))
    model.init_buffers()
    return model


def test_adapters_begin_as_nothing_and_learn_alone():
    spec = LoraSpec(rank=4, targets=("q", "down"))
    model = adapted(spec)
    with torch.no_grad():
        before = model(TOKENS)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_a"):
                parameter.normal_()
    assert torch.equal(model(TOKENS), before), "B is zero"
    model(TOKENS, TOKENS + 1).backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert learning == {
        f"blocks.{layer}.{matrix}.lora_{half}"
        for layer in (0, 1)
        for matrix in ("attention.q", "ffn.down")
        for half in "ab"
    }


@pytest.mark.parametrize("rank", [2, 5])
def test_an_adapter_is_a_matrix_added(rank):
    spec = LoraSpec(rank=rank, alpha=3.0)
    model = adapted(spec)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.normal_(0.0, 0.1)
        wanted = model(TOKENS)
        for module in model.modules():
            if hasattr(module, "lora_a"):
                module.weight += 3.0 / rank * module.lora_b @ module.lora_a
                module.lora_b.zero_()
        torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_a_matrix_outside_of_the_blocks_stays_and_inside_only_those_named_get_adapters(base: str) -> None:
    part = PublishedModel()
    part.q, part.blocks = torch.nn.Linear(128, 64), torch.nn.ModuleList([torch.nn.Module()])
    part.blocks[0].q, part.blocks[0].k = torch.nn.Linear(128, 64), torch.nn.Linear(128, 64)
    with torch.device("meta"):
        apply_lora(part, LoraSpec(rank=2, targets=("q",), base=base))
    kinds = [type(module) for module in (part.q, part.blocks[0].q, part.blocks[0].k)]
    inside = [QuantisedLoraLinear, QuantisedLinear] if base == "nf4" else [LoraLinear, nn.Linear]
    assert kinds == [nn.Linear, *inside]


# Weights in 4 bits


def pair(dtype: torch.dtype) -> tuple[QuantisedLoraLinear, LoraLinear]:
    """Return a quantised layer with a bias, and its twin whose weight is the dequantised one."""
    torch.manual_seed(0)
    linear = nn.Linear(160, 96, device="meta")
    layers = (
        QuantisedLoraLinear(linear, QUANTISED).to_empty(device="cpu"),
        LoraLinear(linear, QUANTISED).to_empty(device="cpu"),
    )
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
