"""Impossible layouts are refused, with the reason and the correction."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build, to_plain
from trainspec_cli.recipe.rules.check import check_engine

EXPERTS = {"num_experts": 4, "top_k": 2, "expert_ffn_size": 64}
NF4 = {"lora.rank": 4, "lora.base": "nf4"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"lora.rank": 4, "layout.pp": 2, "layout.pipeline_schedule": "zbv"}, "layout.pipeline_schedule", "adapters"),
        ({"lora.base": "nf4"}, "lora.base", "not quantised"),
        (NF4 | {"offload": "optimizer"}, "offload", "4-bit ones"),
        (NF4 | {"model.experts": EXPERTS | {"expert_ffn_size": 63}}, "lora.base", "rows of 63"),
        ({"lora.rank": 8, "lora.targets": ["experts.up"]}, "lora.targets", "no routed experts"),
        ({"lora.rank": 4, "lora.targets": ["experts.up"], "model.experts": EXPERTS}, "lora.rank", "multiple of 8"),
        (NF4 | {"model.mla": {"kv_lora_rank": 8}}, "lora.base", "latent attention"),
        (NF4 | {"model.ffn_size": 129}, "lora.base", "rows of 129 (`model.ffn_size`) are not divisible by 2"),
        (NF4 | {"layout.tp": 2, "model.ffn_size": 192}, "layout.tp", "(`model.ffn_size`) do not split into 2"),
        ({"data.document_masks": True, "model.learned_positions": 64}, "data.document_masks", "rotary embeddings"),
        ({"data.document_masks": True, "layout.cp": 2}, "layout.cp", "document masks"),
        ({"layout.cp": 2, "model.attention_sinks": True}, "layout.context_method", "`model.attention_sinks`"),
        ({"layout.cp": 2, "model.mla": {"kv_lora_rank": 8}}, "layout.context_method", "`model.mla`"),
    ],
)
def test_adapters_documents_and_whole_attention(make_spec, changes, path, words):
    """Each rule alone refuses a run that would train something other than the recipe's request."""
    found = [(problem.path, problem.message) for problem in check_engine(make_spec(changes))]
    assert any(where == path and words in message for where, message in found), found


@pytest.mark.parametrize("family", ["hybrid", "conv"])
def test_adapters_and_documents_are_for_decoders_alone(make_spec, family):
    models = {
        "hybrid": {"family": "hybrid", "hidden_size": 64, "vocab_size": 512, "mamba_layers": 2},
        "conv": {"family": "conv", "architecture": "resnet", "input_size": [32, 32], "widths": [8], "blocks": [1]},
    }
    plain = to_plain(make_spec({"lora.rank": 4, "data.document_masks": True})) | {"model": models[family]}
    spec, _ = build(RunSpec, plain)
    found = {problem.path: problem.message for problem in check_engine(spec)}
    assert f"`model.family` is {family}" in found["lora.rank"]
    assert "rotary embeddings" in found["data.document_masks"]


LONGER = {"layout.pp": 2, "model.num_layers": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"lora.rank": 4, "layout.pipeline_schedule": "zbv"},  # one stage splits no backward
        {"lora.rank": 4, "layout.pp": 2},
        {"lora.rank": 4, "lora.base": "nf4", "layout.pp": 2},
        {"data.document_masks": True},
        {"layout.cp": 2, "layout.context_method": "ulysses", "model.sliding_window": 16},
        {"layout.tp": 2, "layout.cp": 2, "layout.pp": 2, "layout.dp_shard": 2},
        {"recompute": "selective", "offload": "optimizer", "layout.tp": 2},
        *(LONGER | {"layout.pipeline_schedule": name, "compile": True} for name in ("zero_bubble", "zbv")),
        LONGER | {"layout.pipeline_schedule": "auto", "layout.virtual_stages": "auto"},
        LONGER | {"layout.pipeline_schedule": "interleaved", "layout.virtual_stages": "auto"},
        LONGER | {"layout.pipeline_schedule": "auto", "layout.virtual_stages": 2},
    ],
)
def test_what_is_legal_or_left_to_the_planner_is_not_refused(make_spec, changes):
    assert check_engine(make_spec(changes)) == []


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep", "etp"])
def test_an_axis_that_is_left_to_the_planner_restricts_nothing(make_spec, axis):
    """Three heads, one layer and a sequence of 63 tokens divide by no 2."""
    odd = {"model.num_heads": 3, "model.num_kv_heads": 3, "model.num_layers": 1, "data.seq_len": 63}
    assert check_engine(make_spec(odd | {f"layout.{axis}": "auto"})) == []


def test_one_expert_rank_needs_no_experts_and_a_capacity_no_cut(make_spec):
    experts = {"num_experts": 8, "top_k": 2, "expert_ffn_size": 16, "capacity_factor": 1.25}
    assert check_engine(make_spec({"layout.ep": 1})) == []
    assert check_engine(make_spec({"model.experts": experts, "layout.dp_shard": 2, "layout.ep": 2})) == []
    for axis in ("cp", "tp"):
        found = check_engine(make_spec({"layout.tp": 1, "layout.cp": 1, "layout.ep": 1, f"layout.{axis}": 2}))
        assert [problem.path for problem in found] == [f"layout.{axis}"], axis
        assert "divides the sequence" in found[0].message
