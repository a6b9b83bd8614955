"""Adapters and 4-bit matrices of routed experts, against merged weights, their gradients, and PEFT."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.models.test_model_types import load, make
from torch import Tensor
from torch.func import functional_call

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.safetensors import adapter_config, adapters_of, parameters
from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.models.lora import AdaptedExperts, QuantisedWeight, apply_lora
from trainspec_cli.engine.nf4 import Nf4, quantise
from trainspec_cli.engine.shares import TENSORS, restore
from trainspec_cli.engine.tools.export import flatten_experts, write_file
from trainspec_cli.planner.workload import adapter_params, quantised_params
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.training import LoraSpec

EXPERTS = ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=24, shared_experts=1, first_dense_layers=1)
MODEL = DecoderModel(3, 32, 4, 2, 8, 48, 61, experts=EXPERTS)
LORA = LoraSpec(rank=8, alpha=20.0, targets=("q", "down", "experts.up", "experts.down"))
TOKENS = torch.arange(1, 25).view(2, 12)


def adapted(spec: LoraSpec, model: DecoderModel = MODEL) -> torch.nn.Module:
    """Return a model whose adapters all have an effect."""
    with torch.device("meta"):
        part = build_model(model, 24)
        apply_lora(part, spec)
    part.to_empty(device="cpu")
    part.init_buffers()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            part.init_parameter(name, parameter, generator)
            if name.endswith("lora_b"):
                parameter.normal_(0.0, 0.1, generator=generator)
        for module in part.modules():
            if isinstance(module, QuantisedWeight):
                shape = (*module.nf4_codes.shape[:-1], 2 * module.nf4_codes.shape[-1])
                for name, tensor in zip(TENSORS, quantise(torch.randn(shape, generator=generator) * 0.05), strict=True):
                    getattr(module, name).copy_(tensor)
    return part


def merged(part: torch.nn.Module, spec: LoraSpec) -> tuple[torch.nn.Module, dict[str, Tensor]]:
    """Return a model without adapters, and weights for it that include them and carry their gradients."""
    plain = build_model(MODEL, 24)
    plain.init_buffers()
    given = dict(part.named_parameters())
    weights: dict[str, Tensor] = {}
    for name, _ in plain.named_parameters():
        owner = name.removesuffix(".weight")
        kept = part.get_submodule(owner) if owner not in given and name not in given else None
        weights[name] = given[name] if kept is None else restore(Nf4(*(getattr(kept, one) for one in TENSORS)))
        if f"{name}_lora_a" in given:
            weights[name] = weights[name] + spec.scale * given[f"{name}_lora_a"] @ given[f"{name}_lora_b"]
        elif f"{owner}.lora_a" in given:
            weights[name] = weights[name] + spec.scale * given[f"{owner}.lora_b"] @ given[f"{owner}.lora_a"]
    return plain, weights


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_logits_and_gradients_are_those_of_merged_weights(base: str) -> None:
    spec = replace(LORA, base=base)
    part = adapted(spec)
    trained = {name: one for name, one in part.named_parameters() if one.requires_grad}
    assert {name for name in trained if ".experts." in name} == {
        f"blocks.{layer}.ffn.experts.{matrix}_lora_{half}"
        for layer in (1, 2)
        for matrix in ("up", "down")
        for half in "ab"
    }
    plain, weights = merged(part, spec)
    torch.testing.assert_close(part(TOKENS), functional_call(plain, weights, (TOKENS,)), rtol=1e-4, atol=1e-5)
    found = torch.autograd.grad(part(TOKENS, TOKENS + 1), list(trained.values()))
    wanted = torch.autograd.grad(functional_call(plain, weights, (TOKENS, TOKENS + 1)), list(trained.values()))
    for name, ours, theirs in zip(trained, found, wanted, strict=True):
        assert theirs.abs().max() > 0, name
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()), msg=name)


@pytest.mark.parametrize("base", ["full", "nf4"])
def test_the_planner_counts_what_the_engine_has(base: str) -> None:
    spec = replace(LORA, base=base)
    part = adapted(spec)
    trained = sum(one.numel() for one in part.parameters() if one.requires_grad)
    assert adapter_params(MODEL, spec) == trained
    held = sum(2 * one.nf4_codes.numel() for one in part.modules() if isinstance(one, QuantisedWeight))
    assert quantised_params(MODEL, spec) == held
    inactive = 1 - EXPERTS.top_k / EXPERTS.num_experts
    of_experts = sum(
        one.numel()
        for module in part.modules()
        if isinstance(module, AdaptedExperts)
        for one in module.parameters()
        if one.requires_grad
    )
    assert adapter_params(MODEL, spec, active=True) == trained - inactive * of_experts


@pytest.mark.parametrize("targets", [("experts.up", "experts.down"), ("experts.up",), ("q", "v", "experts.down")])
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe"])
def test_peft_loads_the_adapters_of_experts(kind: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    theirs = make(kind, 0, tmp_path / "base").eval()
    model, plain = load(tmp_path / "base")
    lora = replace(LORA, targets=targets)
    part = adapted(lora, model)
    part.load_state_dict(plain.state_dict(), strict=False)
    (tmp_path / "adapters").mkdir()
    halves = [half for parameter in parameters(model) for half in adapters_of(parameter, lora)]
    full = {name: one.detach() for name, one in part.named_parameters()}
    held = [flatten_experts(half, full) for half in halves]
    write_file(tmp_path / "adapters" / "adapter_model.safetensors", held, full, "F32")
    config = adapter_config(model, lora, str(tmp_path / "base"))
    (tmp_path / "adapters" / "adapter_config.json").write_text(json_text(config))
    tokens = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = theirs(tokens).logits
        expected = part(tokens)
        found = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapters")(tokens).logits
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (found - before).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize("lora", [LoraSpec(rank=8), replace(LORA, targets=("experts.up", "down"))])
def test_adapters_that_peft_would_put_elsewhere_are_only_merged(lora: LoraSpec, tmp_path: Path) -> None:
    """PEFT takes the names of a shared expert's matrices for those of the routed experts."""
    make("qwen2_moe", 0, tmp_path)
    with pytest.raises(RecipeError) as raised:
        adapter_config(load(tmp_path)[0], lora, "base")
    assert [one.path for one in raised.value.problems] == ["--format"]
