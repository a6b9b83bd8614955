import pytest
import torch

from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.lora import LoraLinear, apply_lora
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import LoraSpec

MODEL = DecoderModel(2, 32, 4, 2, 8, 48, 61, tied_embeddings=True)
TOKENS = torch.arange(12)[None]


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


def test_a_matrix_outside_of_the_blocks_gets_no_adapter():
    part = torch.nn.Module()
    part.q, part.blocks = torch.nn.Linear(4, 4), torch.nn.ModuleList([torch.nn.Module()])
    part.head = torch.nn.Module()
    part.head.q, part.blocks[0].q = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    apply_lora(part, LoraSpec(rank=2, targets=("q",)))
    adapted_ones = [name for name, module in part.named_modules() if isinstance(module, LoraLinear)]
    assert adapted_ones == ["blocks.0.q"]
