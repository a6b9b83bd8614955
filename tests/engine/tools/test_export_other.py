"""Weights in the formats of other projects: torch's own loader judges what is written, and writes what is read."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lab.problems import raises
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from trainspec_cli.core.errors import MachineError, RecipeError, TrainspecError
from trainspec_cli.data.huggingface.config import write_config
from trainspec_cli.data.weights import litgpt_config
from trainspec_cli.data.weights.folder import open_other, read_other_model
from trainspec_cli.data.weights.naming import other_tensors
from trainspec_cli.engine.build.assemble import build_model
from trainspec_cli.engine.build.initial import load_tensors
from trainspec_cli.engine.shares import Cut, Share
from trainspec_cli.engine.tools import export as export_other
from trainspec_cli.recipe.keys.model import DecoderModel, RopeScaling
from trainspec_cli.recipe.records import build

MODELS = {
    "llama": DecoderModel(2, 16, 4, 2, 4, 24, 40),
    "tied": DecoderModel(2, 16, 4, 2, 4, 24, 40, tied_embeddings=True),
    "qwen3": DecoderModel(2, 16, 4, 2, 4, 24, 40, qk_norm=True),
}
pytestmark = pytest.mark.filterwarnings("ignore")


def draw(model: DecoderModel) -> nn.Module:
    torch.manual_seed(5)
    drawn = build_model(model, 16)
    drawn.init_buffers()
    for parameter in drawn.parameters():
        parameter.data.normal_(0.1, 0.3)
    return drawn


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., tuple[Path, nn.Module]]:
    """write(model, naming): -> (a folder with its weights, the model)"""

    def write(model: DecoderModel, naming: Any, dtype: torch.dtype = torch.float32) -> tuple[Path, nn.Module]:
        drawn, folder = draw(model), tmp_path / naming
        held = {name: parameter.detach() for name, parameter in drawn.named_parameters()}
        read = export_other.reader(model, lambda wanted: {one.name: held[one.name] for one in wanted})
        folder.mkdir()
        tensors = other_tensors(model, naming)
        if naming == "litgpt":
            export_other.write_state(tensors, read, dtype, folder / "lit_model.pth")
            (folder / "model_config.yaml").write_text(litgpt_config.write_config(model, 16))
        else:
            assert export_other.write_distributed(tensors, read, dtype, folder) == 1
        return folder, drawn

    return write


def load(folder: Path, model: DecoderModel) -> nn.Module:
    read = build_model(model, 16)
    read.init_buffers()
    load_tensors(folder, open_other(folder, model), model, [Share(*one) for one in read.named_parameters()])
    return read


@pytest.mark.parametrize("naming", ["hf", "torchtitan", "megatron", "megatron_layers", "litgpt"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_come_back_to_the_bit(naming: str, name: str, write: Any) -> None:
    model = MODELS[name]
    folder, drawn = write(model, naming)
    back = load(folder, model)
    tokens = torch.randint(0, model.vocab_size, (2, 9))
    assert all(torch.equal(a, b) for a, b in zip(drawn.parameters(), back.parameters(), strict=True))
    assert torch.equal(drawn(tokens), back(tokens))


def test_torch_itself_loads_what_is_written(write: Any, tmp_path: Path) -> None:
    folder, drawn = write(MODELS["llama"], "hf")
    embed = {"model.embed_tokens.weight": torch.zeros(40, 16)}
    dcp.load(embed, checkpoint_id=folder, no_dist=True)
    assert torch.equal(embed["model.embed_tokens.weight"], drawn.embed.weight)
    stacked, stacked_model = write(MODELS["llama"], "megatron")
    dcp_to_torch_save(stacked, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    fused = torch.stack(
        [torch.cat([block.ffn.gate.weight, block.ffn.up.weight]) for block in stacked_model.blocks.values()]
    )
    assert torch.equal(state["decoder.layers.mlp.linear_fc1.weight"], fused)


def reverse_permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Permute the rows of Hugging Face's queries and keys as torchtitan's adapter does."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def test_torchtitan_has_the_rows_of_each_head_in_pairs(write: Any, tmp_path: Path) -> None:
    folder, drawn = write(MODELS["llama"], "torchtitan")
    dcp_to_torch_save(folder, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    attention = drawn.blocks["1"].attention
    assert torch.equal(state["layers.1.attention.qkv_linear.wq.weight"], reverse_permute(attention.q.weight, 4))
    assert torch.equal(state["layers.1.attention.qkv_linear.wk.weight"], reverse_permute(attention.k.weight, 2))
    assert torch.equal(state["layers.1.attention.qkv_linear.wv.weight"], attention.v.weight)


def test_older_names_and_a_training_checkpoint_are_read_too(write: Any, tmp_path: Path) -> None:
    folder, drawn = write(MODELS["llama"], "torchtitan")
    dcp_to_torch_save(folder, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    older = {name.replace(".qkv_linear", "").replace("lm_head", "output"): held for name, held in state.items()}
    optimizer = {"state": {"norm.weight": {"exp_avg": torch.zeros(16)}}, "step": 3}
    dcp.save({"model": older, "optimizer": optimizer}, checkpoint_id=tmp_path / "older", no_dist=True)
    back = load(tmp_path / "older", MODELS["llama"])
    assert all(torch.equal(a, b) for a, b in zip(drawn.parameters(), back.parameters(), strict=True))


def test_a_rank_reads_its_own_part_of_what_several_ranks_wrote(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes of three rows each; some hold parts of two heads."""

    def boxes(tensor: Any) -> Any:
        rows = tensor.shape[0]
        for low in range(0, rows, 3):
            yield Slice(tensor, low, min(low + 3, rows))

    class Slice(export_other.WrittenBox):
        def __init__(self, tensor: Any, low: int, high: int):
            start, shape = (low, *(0 for _ in tensor.shape[1:])), (high - low, *tensor.shape[1:])
            super().__init__(tensor, start, shape, tensor.rows)

        def read(self, read: Any, dtype: torch.dtype) -> torch.Tensor:
            whole = export_other.WrittenBox(self.tensor, (), self.tensor.shape, self.rows).read(read, dtype)
            return whole[self.start[0] : self.start[0] + self.shape[0]].clone()

    monkeypatch.setattr(export_other, "boxes_of", boxes)
    model = MODELS["llama"]
    folder, drawn = write(model, "torchtitan")
    whole = drawn.blocks["0"].attention.q.weight
    for index in range(2):
        cut = Cut(0, 16, index, 2, group=None)
        part = nn.Parameter(torch.full((8, 16), torch.nan))
        load_tensors(folder, open_other(folder, model), model, [Share("blocks.0.attention.q.weight", part, cut)])
        assert torch.equal(part, whole[cut.start : cut.start + cut.size])


def test_bf16_is_written_and_read(write: Any) -> None:
    folder, drawn = write(MODELS["llama"], "megatron", torch.bfloat16)
    assert torch.equal(load(folder, MODELS["llama"]).embed.weight, drawn.embed.weight.bfloat16().float())


@pytest.mark.parametrize("scaling", [None, RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)])
def test_litgpts_config_says_what_the_model_is(scaling: Any, tmp_path: Path) -> None:
    model = DecoderModel(
        2, 16, 4, 2, 4, 24, 40, attention_bias="qkv", rope_scaling=scaling, rope_theta=5e5, name="mine"
    )
    (tmp_path / "lit_model.pth").touch()
    (tmp_path / "model_config.yaml").write_text(litgpt_config.write_config(model, 16))
    assert build(DecoderModel, read_other_model(tmp_path)) == (model, [])
    (tmp_path / "model_config.yaml").write_text("norm_class_name: LayerNorm\n")
    with raises(RecipeError, "unsupported", "`norm_class_name` 'LayerNorm'", "'RMSNorm'"):
        read_other_model(tmp_path)


def test_a_distributed_checkpoint_needs_a_config_to_say_its_model(write: Any) -> None:
    model = MODELS["qwen3"]
    folder, _ = write(model, "torchtitan")
    with pytest.raises(RecipeError, match=r" without config\.json"):
        read_other_model(folder)
    (folder / "config.json").write_text(json.dumps(write_config(model, 16, "float32")))
    read = build(DecoderModel, read_other_model(folder))[0]
    assert (read.qk_norm, read.num_layers, read.vocab_size) == (True, 2, 40)


def test_nanogpt_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "ckpt.pt").touch()
    for read in (lambda: read_other_model(tmp_path), lambda: open_other(tmp_path, MODELS["llama"])):
        with raises(RecipeError, "unsupported", "nanoGPT", path="init.from"):
            read()


def test_tensors_that_are_not_the_models_are_named(write: Any, tmp_path: Path) -> None:
    folder, _ = write(MODELS["llama"], "hf")
    with pytest.raises(RecipeError) as raised:
        open_other(folder, DecoderModel(1, 16, 4, 2, 4, 32, 40, qk_norm=True))
    told = [problem.message for problem in raised.value.problems]
    assert told[0].startswith(f"{folder} lacks model.layers.0.self_attn.q_norm.weight")
    assert "lacks: model.layers.1." in told[1]
    assert "mlp.gate_proj.weight is 24 x 16 " in told[2] and "32 x 16" in told[2]
    dcp.save({"some": torch.zeros(2)}, checkpoint_id=tmp_path / "other", no_dist=True)
    with raises(RecipeError, "bad_checkpoint", " model.embed_tokens.weight, ", ", but some", path="init.from"):
        open_other(tmp_path / "other", MODELS["llama"])


@pytest.mark.parametrize("naming", ["hf", "litgpt"])
def test_a_file_that_is_cut_short_is_an_error_wherever_it_is_cut(naming: str, write: Any) -> None:
    folder, _ = write(MODELS["llama"], naming)
    file = folder / ("lit_model.pth" if naming == "litgpt" else "__0_0.distcp")
    content = file.read_bytes()
    for length in (0, 100, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(MachineError, match=file.name):
            open_other(folder, MODELS["llama"])
    file.unlink()
    with pytest.raises(TrainspecError):
        open_other(folder, MODELS["llama"])


def test_weights_that_are_not_finite_are_named(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.init, "zeros_", lambda tensor: tensor)
    folder, _ = write(MODELS["llama"], "hf")
    entries = open_other(folder, MODELS["llama"])
    (part,) = entries["model.norm.weight"].parts
    content = bytearray(part.held.file.read_bytes())
    content[part.held.start : part.held.start + 4] = b"\x00\x00\xc0\x7f"
    part.held.file.write_bytes(content)
    with pytest.raises(MachineError, match=r"1 of 16 in model\.norm"):
        load(folder, MODELS["llama"])


class Harmful:
    def __init__(self, file: Path):
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.file),))


def test_a_strangers_metadata_and_files_run_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Harmful(made)))
    with raises(MachineError, "bad_checkpoint", ".metadata", "record of Metadata"):
        open_other(tmp_path, MODELS["llama"])
    (tmp_path / ".metadata").unlink()
    with zipfile.ZipFile(tmp_path / "lit_model.pth", "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"lm_head.weight": Harmful(made)}))
    with raises(MachineError, "bad_checkpoint", " lm_head.weight "):
        open_other(tmp_path, MODELS["llama"])
    assert not made.exists()
