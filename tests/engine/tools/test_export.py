"""Files of an export: how parameters are divided over them, their index, and adapters merged in or alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainspec_cli.core.errors import MachineError
from trainspec_cli.data.huggingface.safetensors import Piece, parameters
from trainspec_cli.engine.tools import export
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.training import LoraSpec
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import ExportRequest, ExportResult
from trainspec_cli.wings.certify.cases import Case, build_plan

MODEL = DecoderModel(1, 8, 2, 1, 4, 12, 10, tied_embeddings=True)
SIZES = {name: parameter.numel for parameter in parameters(MODEL) for name in [parameter.name]}
LORA = LoraSpec(rank=2, alpha=6.0, targets=("q", "down"))


def plan_of(lora: LoraSpec | None = None) -> Plan:
    plan = build_plan(Case("dense"), "cpu")
    return replace(plan, spec=replace(plan.spec, model=MODEL, lora=lora or LoraSpec()))


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """What the checkpoint holds, drawn as it is read."""
    held: dict[str, torch.Tensor] = {}

    def read(folder: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
        assert folder == Path("the checkpoint")
        for name, shape in shapes.items():
            held[name] = torch.randn(shape, generator=torch.Generator().manual_seed(sum(name.encode())))
        return {name: held[name].clone() for name in shapes}

    monkeypatch.setattr(export, "read_weights", read)
    monkeypatch.setattr(export, "stored_adapters", lambda folder: set())
    return held


def request(folder: Path, dtype: str = "F32", max_file_bytes: int = 10**9, alone: bool = False) -> ExportRequest:
    return ExportRequest(
        "", "the checkpoint", str(folder), dtype, max_file_bytes, what="adapters" if alone else "merged"
    )


def test_files_are_filled_in_order_up_to_their_size(tmp_path: Path) -> None:
    """The embedding (80 numbers) and a norm (8) fill the first exactly, at two bytes each."""
    wanted = parameters(MODEL)
    assert [SIZES[one.name] for one in wanted[:4]] == [80, 8, 64, 32]
    groups = list(export._files(wanted, request(tmp_path, "BF16", 176)))
    assert [[one.name for one in group] for group in groups][:2] == [
        ["embed.weight", "blocks.0.attention_norm.weight"],
        ["blocks.0.attention.q.weight"],
    ]
    assert [one.name for group in groups for one in group] == [one.name for one in wanted]
    assert all(sum(one.numel for one in group) * 2 <= 176 or len(group) == 1 for group in groups)
    smaller = list(export._files(wanted, request(tmp_path, "BF16", 174)))
    assert len(smaller[0]) == 1, "a byte less, and the norm goes to the next file"
    assert [len(group) for group in export._files(wanted, request(tmp_path, "F32", 1))] == [1] * len(wanted)


def test_a_file_begins_only_where_the_one_before_has_no_room(tmp_path: Path) -> None:
    groups = list(export._files(parameters(MODEL), request(tmp_path, "BF16", 250)))
    sizes = [sum(one.numel for one in group) * 2 for group in groups]
    assert len(groups) > 3
    assert all(size <= 250 for size in sizes)
    assert all(size + group[0].numel * 2 > 250 for size, group in zip(sizes, groups[1:], strict=False))


def test_one_file_has_no_index(tmp_path: Path, stored: dict[str, torch.Tensor]) -> None:
    assert export.export(plan_of(), request(tmp_path)) == 1
    assert [file.name for file in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert set(found) == {piece.tensor for one in parameters(MODEL) for piece in one.pieces}
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], stored["blocks.0.ffn.up.weight"])


@pytest.mark.parametrize(("dtype", "size"), [("F32", 4), ("BF16", 2)])
def test_several_files_are_named_by_an_index(
    dtype: str, size: int, tmp_path: Path, stored: dict[str, torch.Tensor]
) -> None:
    count = export.export(plan_of(), request(tmp_path, dtype, 100 * size))
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    assert count > 2
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted([*names, "model.safetensors.index.json"])
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(SIZES.values()) * size
    held = {name: set(load_file(tmp_path / name)) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in held.items() for tensor in tensors}
    assert list(index["weight_map"]) == sorted(index["weight_map"])
    found = load_file(tmp_path / index["weight_map"]["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    assert torch.equal(found, stored["embed.weight"].to(export.DTYPES[dtype]))


def test_adapters_are_merged_into_their_matrices(stored: dict[str, torch.Tensor]) -> None:
    wanted = [one for one in parameters(MODEL) if one.name.endswith(("q.weight", "k.weight", "down.weight"))]
    found = export.read(plan_of(LORA), Path("the checkpoint"), wanted)
    assert set(found) == {one.name for one in wanted}
    assert torch.equal(found["blocks.0.attention.k.weight"], stored["blocks.0.attention.k.weight"])
    for matrix in ("attention.q", "ffn.down"):
        weight, a, b = (stored[f"blocks.0.{matrix}.{leaf}"] for leaf in ("weight", "lora_a", "lora_b"))
        torch.testing.assert_close(found[f"blocks.0.{matrix}.weight"], weight + 3.0 * b @ a)


def test_adapters_alone_are_one_file_under_pefts_names(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "read_plan_file", lambda path: plan_of(LORA))
    assert export.run(request(tmp_path, alone=True)) == ExportResult(1)
    (file,) = tmp_path.iterdir()
    found = load_file(file)
    assert file.name == "adapter_model.safetensors"
    prefix = "base_model.model.model.layers.0"
    assert set(found) == {
        f"{prefix}.{matrix}.lora_{half}.weight" for matrix in ("self_attn.q_proj", "mlp.down_proj") for half in "AB"
    }
    assert torch.equal(found[f"{prefix}.mlp.down_proj.lora_B.weight"], stored["blocks.0.ffn.down.lora_b"])
    tmp = tmp_path / "whole"
    tmp.mkdir()
    assert export.run(request(tmp, max_file_bytes=400)).files > 1


@pytest.mark.parametrize("alone", [False, True])
def test_adapters_that_no_exported_matrix_has_are_refused(
    alone: bool, tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "read_plan_file", lambda path: plan_of(LORA))
    monkeypatch.setattr(
        export, "stored_adapters", lambda folder: {"blocks.0.ffn.down.lora_a", "blocks.0.ffn.up.lora_a"}
    )
    with pytest.raises(MachineError) as refused:
        export.run(request(tmp_path, alone=alone))
    assert [problem.code for problem in refused.value.problems] == ["bad_checkpoint"]
    assert list(tmp_path.iterdir()) == []


def test_the_base_of_adapters_has_nothing_merged_in(
    tmp_path: Path, stored: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "read_plan_file", lambda path: plan_of(LORA))
    found = {}
    for what in ("base", "merged"):
        folder = tmp_path / what
        folder.mkdir()
        export.run(replace(request(folder), what=what))
        found[what] = load_file(folder / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert torch.equal(found["base"], stored["blocks.0.ffn.down.weight"])
    assert not torch.equal(found["merged"], found["base"])


def test_a_tensor_is_cut_out_of_the_experts_that_it_is_put_together_with() -> None:
    """The second expert's third and fourth columns, which the file has as rows."""
    full = torch.arange(3 * 2 * 6).view(3, 2, 6)
    piece = Piece("w", (1, 0, 2), (1, 2, 2), transposed=True)
    assert torch.equal(export.cut(full, piece), full[1, :, 2:4].T)
    plain = Piece("w", (1, 0, 2), (1, 2, 2), transposed=False)
    assert torch.equal(export.cut(full, plain), full[1:2, :, 2:4])
