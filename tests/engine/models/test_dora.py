"""DoRA against PEFT's (`use_dora`): the same losses, weights that PEFT loads, and the same merged weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine.models.test_model_types import load, make
from torch.nn.functional import cross_entropy

from trainspec_cli.data.huggingface.safetensors import adapter_config, adapters_of, parameters
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.models.lora import apply_lora, start_magnitudes
from trainspec_cli.engine.tools import export
from trainspec_cli.planner.workload import adapter_params
from trainspec_cli.recipe.json_text import json_text
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.wings.certify.cases import Case, build_plan

peft = pytest.importorskip("peft")

STEPS = 10
LORA = LoraSpec(rank=4, alpha=8.0, targets=("q", "v", "out", "up", "down"), magnitude=True)
ADAMW = {"lr": 2e-2, "weight_decay": 0.0}


def adapted(folder: Path) -> tuple[DecoderModel, Decoder]:
    """Return the folder's model with fresh adapters."""
    model, plain = load(folder)
    with torch.device("meta"):
        part = Decoder(model, 64)
        apply_lora(part, LORA)
    part.to_empty(device="cpu")
    part.init_buffers()
    part.load_state_dict(plain.state_dict(), strict=False)
    for number, (name, parameter) in enumerate(part.named_parameters()):
        if "lora_" in name:
            with torch.no_grad():
                part.init_parameter(name, parameter, torch.Generator().manual_seed(number))
    start_magnitudes([part])
    return model, part


def write(model: DecoderModel, part: Decoder, base: Path, folder: Path) -> None:
    """Write the adapters as `trainspec export --format peft` does."""
    folder.mkdir()
    halves = [half for parameter in parameters(model) for half in adapters_of(parameter, LORA)]
    full = {name: one.detach() for name, one in part.named_parameters()}
    export.write_file(folder / "adapter_model.safetensors", halves, full, "F32")
    (folder / "adapter_config.json").write_text(json_text(adapter_config(model, LORA, str(base))))


def drawn(step: int) -> torch.Tensor:
    return torch.randint(1, 96, (2, 24), generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_losses_are_those_of_peft_and_it_loads_the_result(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make(kind, 0, tmp_path / "base")
    model, part = adapted(tmp_path / "base")
    write(model, part, tmp_path / "base", tmp_path / "first")
    wrapped = peft.PeftModel.from_pretrained(theirs, tmp_path / "first", is_trainable=True)
    trained = [one for one in part.parameters() if one.requires_grad]
    assert sum(one.numel() for one in trained) == adapter_params(model, LORA)
    assert sum(one.numel() for one in wrapped.parameters() if one.requires_grad) == adapter_params(model, LORA)
    optimizers = [
        torch.optim.AdamW(trained, **ADAMW),
        torch.optim.AdamW([one for one in wrapped.parameters() if one.requires_grad], **ADAMW),
    ]
    losses: list[tuple[float, float]] = []
    for step in range(STEPS):
        tokens = drawn(step)
        ours = part(tokens[:, :-1], tokens[:, 1:]) / tokens[:, 1:].numel()
        other = cross_entropy(wrapped(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten())
        for loss, optimizer in zip((ours, other), optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((float(ours), float(other)))
    assert [ours for ours, _ in losses] == pytest.approx([other for _, other in losses], abs=1e-6)
    moved = [
        (one - first).abs().max()
        for (_, one), (_, first) in zip(
            part.named_parameters(), adapted(tmp_path / "base")[1].named_parameters(), strict=True
        )
        if one.requires_grad
    ]
    assert min(moved) > 1e-2, "magnitudes too"

    write(model, part, tmp_path / "base", tmp_path / "last")
    loaded = peft.PeftModel.from_pretrained(make(kind, 0, tmp_path / "again"), tmp_path / "last").eval()
    _, merged = load(tmp_path / "base")
    monkeypatch.setattr(
        export,
        "read_weights",
        lambda _, shapes: {name: dict(part.named_parameters())[name].detach().clone() for name in shapes},
    )
    plan = build_plan(Case("dense"), "cpu")
    plan = replace(plan, spec=replace(plan.spec, model=model, lora=LORA))
    merged.load_state_dict(export.read(plan, tmp_path, parameters(model)), strict=False)
    with torch.no_grad():
        expected = part(drawn(0))
        for found in (loaded(drawn(0)).logits, merged(drawn(0))):
            assert (found - expected).abs().max() <= 2e-5 * expected.abs().max()
