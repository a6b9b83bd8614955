"""Layers that predict further tokens (multi-token prediction, arXiv:2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine.models.test_model_types import LATENT
from torch import Tensor

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.config import model_type, read_model
from trainspec_cli.data.huggingface.folder import open_weights, read_config
from trainspec_cli.data.huggingface.safetensors import parameters, places_of
from trainspec_cli.engine.build.initial import buffer_shares, load_tensors
from trainspec_cli.engine.digest import IGNORED_TARGET
from trainspec_cli.engine.models.decoder import Decoder
from trainspec_cli.engine.shares import Share
from trainspec_cli.engine.tools.export import assemble
from trainspec_cli.planner.workload import count_params
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.records import build

transformers = pytest.importorskip("transformers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
safetensors = pytest.importorskip("safetensors.torch")

SEQ_LEN = 12
LAYERS = 2
TINY = DecoderModel(2, 32, 4, 2, 8, 48, 64, prediction_layers=LAYERS)


def published(mtp: torch.nn.Module, theirs: torch.nn.Module) -> dict[str, Tensor]:
    """Return the tensors of prediction layers under the names of DeepSeek's folders."""
    found = {}
    for name, tensor in mtp.layers.state_dict().items():
        number, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        place = f"model.layers.{theirs.config.num_hidden_layers + int(number)}"
        if not rest.startswith("mlp.experts."):
            found[f"{place}.{rest}"] = tensor.contiguous()
            continue
        for expert, matrix in enumerate(tensor):
            halves = matrix.chunk(2) if rest.endswith("gate_up_proj") else (matrix,)
            leaves = ("gate_proj", "up_proj") if len(halves) == 2 else ("down_proj",)
            for leaf, half in zip(leaves, halves, strict=True):
                found[f"{place}.mlp.experts.{expert}.{leaf}.weight"] = half.clone()
    for number in range(LAYERS):
        place = f"model.layers.{theirs.config.num_hidden_layers + number}"
        found[f"{place}.embed_tokens.weight"] = theirs.model.embed_tokens.weight.detach().clone()
        found[f"{place}.shared_head.head.weight"] = theirs.lm_head.weight.detach().clone()
    return found


def make(folder: Path) -> tuple[Any, Any, dict[str, Tensor]]:
    """Return (transformers' model, its prediction layers, the tensors of both), and write their folder."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v3", **LATENT, num_mtp_layers=LAYERS)
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    mtp = modeling_layers.MtpModel(theirs, LAYERS).float()
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *mtp.layers.parameters()):
            tensor.copy_((tensor.dim() == 1) + torch.randn_like(tensor) * 0.1)
        for name, tensor in (*theirs.named_buffers(), *mtp.named_buffers()):
            if name.endswith("e_score_correction_bias"):
                tensor.add_(torch.randn_like(tensor) * 0.1)
    theirs.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = safetensors.load_file(file) | published(mtp, theirs)
    safetensors.save_file(tensors, file)
    return theirs.eval(), mtp.eval(), tensors


def load(folder: Path) -> tuple[DecoderModel, Decoder]:
    model, problems = build(DecoderModel, read_model(read_config(folder), "config.json"))
    assert problems == [] and model.prediction_layers == 0
    model = replace(model, prediction_layers=LAYERS, prediction_loss_weight=0.5)
    ours = Decoder(model, 64)
    ours.init_buffers()
    shares = [Share(name, parameter) for name, parameter in ours.named_parameters()]
    load_tensors(folder, open_weights(folder, model), model, [*shares, *buffer_shares([ours])])
    return model, ours


def reference_losses(theirs: Any, mtp: Any, text_BS: Tensor, weight: float) -> tuple[Tensor, Tensor]:
    """Return (the loss of the next token, the loss to train on), by the paper's equations 21 to 25."""
    count = text_BS.shape[1] - 1
    positions = torch.arange(count)[None]
    hidden = theirs.model(text_BS[:, :-1]).last_hidden_state
    logits = theirs.lm_head(hidden)
    main = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text_BS[:, 1:].flatten())
    mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
    further = []
    for k in range(1, LAYERS + 1):
        # Position i of layer k reads token i + k, and predicts token i + k + 1.
        hidden, kept = hidden[:, : count - k], count - k
        embedded = theirs.model.embed_tokens(text_BS[:, k : k + kept])
        rotation = theirs.model.rotary_emb(hidden, positions[:, :kept])
        hidden = mtp.layers[k - 1](embedded, hidden, rotation, mask[..., :kept, :kept], positions[:, :kept], None)
        logits = theirs.lm_head(hidden)
        wanted = text_BS[:, k + 1 : k + 1 + kept]
        total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum")
        further.append(total / (count * len(text_BS)))
    return main, main + weight / LAYERS * sum(further)


def test_losses_are_those_of_the_papers_equations(tmp_path: Path) -> None:
    theirs, mtp, _ = make(tmp_path)
    model, ours = load(tmp_path)
    trained = [*theirs.parameters(), *mtp.layers.parameters()]
    assert count_params(model) == sum(parameter.numel() for parameter in trained)
    optimizers = [torch.optim.SGD(trained, lr=0.05), torch.optim.SGD(ours.parameters(), lr=0.05)]
    generator = torch.Generator().manual_seed(0)
    losses: list[list[float]] = [[], []]
    for _ in range(25):
        text = torch.randint(1, 96, (2, SEQ_LEN + 1), generator=generator)
        expected, to_train_on = reference_losses(theirs, mtp, text, 0.5)
        found = ours(text[:, :-1], text[:, 1:]) / (2 * SEQ_LEN)
        for optimizer, loss in zip(optimizers, (to_train_on, found), strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses[0].append(expected.item())
        losses[1].append(found.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_folders_hold_the_layers_under_deepseeks_names(tmp_path: Path) -> None:
    _, _, tensors = make(tmp_path)
    model, ours = load(tmp_path)
    full = ours.state_dict()
    written = {name: assemble(places, full) for name, places in places_of(parameters(model)).items()}
    assert written.keys() == tensors.keys()
    assert [name for name, tensor in written.items() if not torch.equal(tensor, tensors[name])] == []
    assert open_weights(tmp_path, replace(model, prediction_layers=0)).keys() == tensors.keys()
    with pytest.raises(RecipeError):
        open_weights(tmp_path, replace(model, prediction_layers=LAYERS + 1))
    with pytest.raises(RecipeError) as raised:
        model_type(replace(TINY, hf_type="llama"))
    assert [one.path for one in raised.value.problems] == ["model.prediction_layers"]


def test_outdated_copies_of_embedding_and_head_are_not_read(tmp_path: Path) -> None:
    """Some programs leave the prediction layers of the base in the folder of a fine-tuned model."""
    _, _, tensors = make(tmp_path)
    file = tmp_path / "model.safetensors"
    outdated = {
        name: tensor + 1 for name, tensor in tensors.items() if name.endswith((".embed_tokens.weight", ".head.weight"))
    }
    del outdated["model.embed_tokens.weight"]
    assert len(outdated) == 2 * LAYERS
    safetensors.save_file(tensors | outdated, file)
    _, ours = load(tmp_path)
    assert ours.embed is not None and torch.equal(ours.embed.weight, tensors["model.embed_tokens.weight"])
    assert ours.head is not None and torch.equal(ours.head.weight, tensors["lm_head.weight"])


def test_a_text_that_ends_has_no_further_targets() -> None:
    """Documents of one row train the layers as they do in rows of their own, and the reported loss is the main one."""
    ours = Decoder(TINY, 24).double()
    ours.init_buffers()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    tokens = torch.randint(0, 64, (1, 24), generator=generator)
    targets = tokens.roll(-1, 1)
    targets[0, [9, 23]] = IGNORED_TARGET
    documents = torch.tensor([[0] * 10 + [1] * 14])

    def gradients(rows: list[tuple[Tensor, ...]]) -> tuple[float, dict[str, Tensor]]:
        ours.zero_grad()
        loss = sum(ours(*row) for row in rows)
        loss.backward()
        return loss.item(), {name: parameter.grad.clone() for name, parameter in ours.named_parameters()}

    loss, together = gradients([(tokens, targets, documents)])
    parts = [slice(0, 10), slice(10, 24)]
    apart_loss, apart = gradients([(tokens[:, part], targets[:, part]) for part in parts])
    assert loss == pytest.approx(apart_loss, rel=1e-9)
    # The angles of rotary embeddings are in fp32, and only their differences matter.
    errors = {name: ((together[name] - apart[name]).norm() / apart[name].norm()).item() for name in apart}
    assert max(errors.values()) < 1e-6, errors
    assert all(gradient.any() for gradient in together.values())
    with torch.no_grad():
        assert ours(tokens, targets, documents).item() == pytest.approx(loss, rel=1e-12)
