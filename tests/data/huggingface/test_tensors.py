"""The tensors of a checkpoint, by name, place and shape; and the adapters beside them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lab.problems import assert_problems

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface import folder as checkpoint
from trainspec_cli.data.huggingface.safetensors import (
    Parameter,
    Piece,
    StoredTensor,
    adapter_config,
    adapters_of,
    make_header,
    parameters,
)
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.training import LoraSpec

MODEL = DecoderModel(num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, head_dim=3, ffn_size=10, vocab_size=20)
LAYER = "model.layers.0"


def table(model: DecoderModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (tensor, shape) of the parameters that are one tensor."""
    return {found.name: (found.pieces[0].tensor, found.shape) for found in parameters(model) if len(found.pieces) == 1}


def test_the_parameters_of_a_decoder() -> None:
    assert table(MODEL) == {
        "embed.weight": ("model.embed_tokens.weight", (20, 8)),
        "blocks.0.attention_norm.weight": (f"{LAYER}.input_layernorm.weight", (8,)),
        "blocks.0.attention.q.weight": (f"{LAYER}.self_attn.q_proj.weight", (12, 8)),
        "blocks.0.attention.k.weight": (f"{LAYER}.self_attn.k_proj.weight", (6, 8)),
        "blocks.0.attention.v.weight": (f"{LAYER}.self_attn.v_proj.weight", (6, 8)),
        "blocks.0.attention.out.weight": (f"{LAYER}.self_attn.o_proj.weight", (8, 12)),
        "blocks.0.ffn_norm.weight": (f"{LAYER}.post_attention_layernorm.weight", (8,)),
        "blocks.0.ffn.gate.weight": (f"{LAYER}.mlp.gate_proj.weight", (10, 8)),
        "blocks.0.ffn.up.weight": (f"{LAYER}.mlp.up_proj.weight", (10, 8)),
        "blocks.0.ffn.down.weight": (f"{LAYER}.mlp.down_proj.weight", (8, 10)),
        "norm.weight": ("model.norm.weight", (8,)),
        "head.weight": ("lm_head.weight", (20, 8)),
    }


def test_a_tensor_that_is_a_whole_parameter_fills_it_from_its_beginning() -> None:
    pieces = [(found, *found.pieces) for found in parameters(MODEL)]
    assert all(piece.start == (0,) * len(found.shape) and piece.shape == found.shape for found, piece in pieces)


def test_each_layer_has_its_own() -> None:
    names = [found.name for found in parameters(replace(MODEL, num_layers=3))]
    assert len(names) == len(set(names)) == 3 + 3 * 9


@pytest.mark.parametrize(
    ("changes", "more", "less"),
    [
        ({"tied_embeddings": True}, {}, {"head.weight"}),
        (
            {"attention_bias": "qkv"},
            {f"blocks.0.attention.{m}.bias": (f"{LAYER}.self_attn.{m}_proj.bias", (size,))
             for m, size in (("q", 12), ("k", 6), ("v", 6))},
            set(),
        ),
        (
            {"qk_norm": True},
            {f"blocks.0.attention.{m}_norm.weight": (f"{LAYER}.self_attn.{m}_norm.weight", (3,)) for m in "qk"},
            set(),
        ),
    ],
)  # fmt: skip
def test_what_an_option_adds_or_takes_away(changes, more, less) -> None:
    plain = table(MODEL)
    assert table(replace(MODEL, **changes)) == {name: plain[name] for name in plain if name not in less} | more


def test_biases_of_all_projections() -> None:
    found = table(replace(MODEL, attention_bias="all"))
    assert found["blocks.0.attention_bias"] == (f"{LAYER}.self_attn.o_proj.bias", (8,))
    assert found["blocks.0.attention.v.bias"] == (f"{LAYER}.self_attn.v_proj.bias", (6,))


EXPERTS = replace(MODEL, experts=ExpertSpec(num_experts=2, top_k=1, expert_ffn_size=5))


@pytest.mark.parametrize(
    ("qk_norm", "owner", "names"),
    [(False, "block_sparse_moe", ("w1", "w3", "w2")), (True, "mlp", ("gate_proj", "up_proj", "down_proj"))],
)
def test_experts_are_stacked_and_their_halves_lie_side_by_side(qk_norm, owner, names) -> None:
    found = {one.name: one for one in parameters(replace(EXPERTS, qk_norm=qk_norm))}
    theirs, (gate, up, down) = f"{LAYER}.{owner}", names
    assert table(replace(EXPERTS, qk_norm=qk_norm))["blocks.0.ffn.router.weight"] == (f"{theirs}.gate.weight", (2, 8))
    ups, downs = found["blocks.0.ffn.experts.up"], found["blocks.0.ffn.experts.down"]
    assert (ups.shape, downs.shape, ups.numel) == ((2, 8, 10), (2, 5, 8), 160)
    assert [(piece.tensor, piece.start, piece.shape, piece.tensor_shape) for piece in ups.pieces] == [
        (f"{theirs}.experts.{expert}.{name}.weight", (expert, 0, at), (1, 8, 5), (5, 8))
        for expert in (0, 1)
        for name, at in ((gate, 0), (up, 5))
    ]
    assert [(piece.tensor, piece.start, piece.tensor_shape) for piece in downs.pieces] == [
        (f"{theirs}.experts.{expert}.{down}.weight", (expert, 0, 0), (8, 5)) for expert in (0, 1)
    ]
    assert all(piece.transposed for piece in (*ups.pieces, *downs.pieces))


@pytest.mark.parametrize(
    ("start", "shape", "expected"),
    [
        ((2, 3), (4, 5), ((slice(0, 4), slice(0, 5)), (slice(0, 4), slice(0, 5)))),
        ((0, 0), (4, 4), ((slice(0, 2), slice(0, 1)), (slice(2, 4), slice(3, 4)))),
        ((5, 6), (9, 9), ((slice(3, 4), slice(3, 5)), (slice(0, 1), slice(0, 2)))),
        ((6, 3), (1, 5), None),
        ((0, 3), (2, 5), None),
        ((2, 8), (4, 1), None),
    ],
)
def test_the_overlap_of_a_box_and_a_piece_of_rows_2_to_5_and_columns_3_to_7(start, shape, expected) -> None:
    assert Piece("t", (2, 3), (4, 5)).overlap(start, shape) == expected


def test_a_tensor_that_is_not_transposed_has_the_shape_of_its_box() -> None:
    assert Piece("t", (0, 0, 0), (1, 2, 3)).tensor_shape == (1, 2, 3)


LORA = LoraSpec(rank=2, alpha=7.0, targets=("q", "down"))


def test_an_adapter_has_two_halves() -> None:
    by_name = {found.name: found for found in parameters(MODEL)}
    first, second = adapters_of(by_name["blocks.0.ffn.down.weight"], LORA)
    tensor = f"base_model.model.{LAYER}.mlp.down_proj"
    assert first == Parameter("blocks.0.ffn.down.lora_a", (2, 10), (Piece(f"{tensor}.lora_A.weight", (0, 0), (2, 10)),))
    assert second == Parameter("blocks.0.ffn.down.lora_b", (8, 2), (Piece(f"{tensor}.lora_B.weight", (0, 0), (8, 2)),))
    adapted = [found.name for found in parameters(MODEL) if adapters_of(found, LORA)]
    assert adapted == ["blocks.0.attention.q.weight", "blocks.0.ffn.down.weight"]


def test_biases_other_matrices_and_a_rank_of_0_have_no_adapter() -> None:
    biased = replace(MODEL, attention_bias="qkv")
    assert [found.name for found in parameters(biased) if adapters_of(found, LORA) and "bias" in found.name] == []
    assert [found for found in parameters(MODEL) if adapters_of(found, replace(LORA, rank=0))] == []
    assert adapters_of(Parameter("q.weight", (2, 2), (Piece("t", (0, 0), (2, 2)),)), LORA) == []


def test_the_config_of_adapters() -> None:
    assert adapter_config(MODEL, replace(LORA, targets=("q", "k", "v", "out", "gate", "up", "down")), "base") == {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 2,
        "lora_alpha": 7.0,
        "lora_dropout": 0.0,
        "use_dora": False,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "target_parameters": None,
        "bias": "none",
        "inference_mode": True,
    }


def test_matrices_that_share_a_tensor_have_no_adapter_in_pefts_format() -> None:
    with pytest.raises(RecipeError) as raised:
        adapter_config(replace(MODEL, head_dim=2, hf_type="phi3"), LORA, "base")
    assert [(one.code, one.path) for one in raised.value.problems] == [("unsupported", "--format")]


def stored(model: DecoderModel) -> dict[str, StoredTensor]:
    pieces = [piece for found in parameters(model) for piece in found.pieces]
    return {piece.tensor: StoredTensor(Path("w"), "F32", piece.tensor_shape, 0) for piece in pieces}


def test_faults_of_a_folders_tensors() -> None:
    here = Path("here")
    entries = stored(MODEL)
    assert checkpoint.find_faults(entries, MODEL, here) == []
    del entries["lm_head.weight"]
    entries["odd"] = entries["model.norm.weight"]
    entries["model.norm.weight"] = replace(entries["odd"], shape=(9,))
    entries[f"{LAYER}.self_attn.rotary_emb.inv_freq"] = entries["odd"]
    assert_problems(
        checkpoint.find_faults(entries, MODEL, here),
        ("bad_checkpoint", "init.from", "here lacks lm_head.weight"),
        ("bad_checkpoint", "init.from", "here has tensors", ": odd"),
        ("bad_checkpoint", "init.from", "here has wrong shapes", "model.norm.weight is 9", " 8"),
    )


def test_a_head_of_tied_embeddings_is_redundant() -> None:
    assert checkpoint.find_faults(stored(MODEL), replace(MODEL, tied_embeddings=True), Path("here")) == []


def test_of_many_names_the_first_eight_are_listed() -> None:
    assert checkpoint.list_names(list("abcdefgh")) == "a, b, c, d, e, f, g, h"
    assert checkpoint.list_names(list("abcdefghij")) == "a, b, c, d, e, f, g, h and 2 more"


def test_weights_are_opened_where_they_match(tmp_path: Path) -> None:
    wanted = stored(MODEL)
    header = make_header({name: ("F32", entry.shape) for name, entry in wanted.items()})
    (tmp_path / "model.safetensors").write_bytes(header + bytes(sum(entry.bytes for entry in wanted.values())))
    found = checkpoint.open_weights(tmp_path, MODEL)
    assert {name: entry.shape for name, entry in found.items()} == {name: one.shape for name, one in wanted.items()}
    with pytest.raises(RecipeError, match=r"embed_tokens.weight is 20 x 8 .* 21 x 8"):
        checkpoint.open_weights(tmp_path, replace(MODEL, vocab_size=21))


def test_more_experts_than_can_be_checked_are_refused(tmp_path: Path) -> None:
    huge = replace(EXPERTS, num_layers=1000, experts=ExpertSpec(num_experts=200, top_k=1, expert_ffn_size=5))
    with pytest.raises(RecipeError, match="1,000 layers of 200 experts"):
        checkpoint.open_weights(tmp_path, huge)
