"""Whose tensors are named how, and of which rows of Hugging Face's they are made."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.data.huggingface.safetensors import parameters
from trainspec_cli.data.weights.naming import Naming, RowRange, other_tensors
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec

MODEL = DecoderModel(2, 16, 4, 2, 4, 24, 40)
MODELS = {
    "llama": MODEL,
    "tied": replace(MODEL, tied_embeddings=True),
    "qwen2": replace(MODEL, attention_bias="qkv"),
    "qwen3": replace(MODEL, qk_norm=True),
}
NAMINGS: tuple[Naming, ...] = ("hf", "torchtitan", "megatron", "megatron_layers", "litgpt")
SAID = [pair for pair in product(MODELS, NAMINGS) if pair != ("qwen2", "torchtitan")]
"""torchtitan has no names for biases."""


@pytest.mark.parametrize(("name", "naming"), SAID)
def test_every_row_of_every_tensor_has_one_place(naming: Naming, name: str) -> None:
    model = MODELS[name]
    tensors = other_tensors(model, naming)
    wanted = {
        (piece.tensor, row)
        for parameter in parameters(model)
        for piece in parameter.pieces
        for row in range(piece.shape[0])
    }
    taken = [
        (rows.tensor, rows.start + at)
        for one in tensors
        if not one.is_copy
        for rows in one.rows
        for at in range(rows.count)
    ]
    assert sorted(taken) == sorted(wanted)
    for one in tensors:
        places = [(rows.layer, rows.at + rows.step * at) for rows in one.rows for at in range(rows.count)]
        stacked = one.rows[0].layer is not None
        rows = one.shape[0] * one.shape[1] if stacked else one.shape[0]
        assert len(set(places)) == len(places) == rows
        assert max(place for _, place in places) == one.shape[stacked] - 1


def test_rows_lie_where_each_project_has_them() -> None:
    found = {naming: {one.name: one for one in other_tensors(MODEL, naming)} for naming in NAMINGS}
    query, key, value = (f"model.layers.1.self_attn.{matrix}_proj.weight" for matrix in "qkv")
    pairs = found["torchtitan"]["layers.1.attention.qkv_linear.wk.weight"].rows
    assert pairs == (
        RowRange(key, 0, 2, 0, 2),
        RowRange(key, 2, 2, 1, 2),
        RowRange(key, 4, 2, 4, 2),
        RowRange(key, 6, 2, 5, 2),
    )
    joined = found["litgpt"]["transformer.h.1.attn.qkv.weight"]
    assert joined.shape == (32, 16)
    assert joined.rows == (RowRange(query, 0, 16, 0), RowRange(key, 0, 8, 16), RowRange(value, 0, 8, 24))
    stack = found["megatron"]["decoder.layers.self_attention.linear_qkv.weight"]
    assert stack.shape == (2, 32, 16)
    assert [(one.tensor, one.start, one.at) for one in stack.rows if one.layer == 1] == [
        *((query, 0, 0), (key, 0, 8), (value, 0, 12)),
        *((query, 8, 16), (key, 4, 24), (value, 4, 28)),
    ]
    assert found["megatron_layers"]["decoder.layers.0.mlp.linear_fc1.weight"].shape == (48, 16)


@pytest.mark.parametrize("naming", NAMINGS[1:])
def test_a_model_that_a_project_does_not_have_is_refused_by_name(naming: Naming) -> None:
    with pytest.raises(RecipeError, match=f"type mixtral; {naming}'s names .* llama"):
        other_tensors(replace(MODEL, experts=ExpertSpec(4, 2, 8)), naming)
    with pytest.raises(RecipeError, match=r"`model\.attention_bias`"):
        other_tensors(replace(MODEL, attention_bias="all"), naming)
