"""What the sizes of a model must fit, each refusal by its path."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel
from trainspec_cli.recipe.rules.check import check

DECODER = DecoderModel(
    num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, ffn_size=96, vocab_size=512
)
EXPERTS = ExpertSpec(num_experts=8, top_k=2, expert_ffn_size=16)
HYBRID = HybridModel(hidden_size=64, vocab_size=512, mamba_layers=2, mlp_layers=1, ffn_size=96, mamba_head_dim=16)


def with_experts(**changes) -> DecoderModel:
    return replace(DECODER, experts=replace(EXPERTS, **changes))


@pytest.mark.parametrize(
    ("model", "path", "message"),
    [
        (with_experts(top_k=9), "model.experts.top_k", "cannot visit 9"),
        (with_experts(num_groups=3), "model.experts.num_groups", "do not divide into 3 groups"),
        (with_experts(num_groups=8), "model.experts.top_groups", "1 of 8 groups"),
        (with_experts(expert_ffn_size=20), "model.experts.expert_ffn_size", "a multiple of 8"),
        (replace(HYBRID, layer_pattern="MM"), "model.layer_pattern", "2 x M, 1 x -"),
        (replace(HYBRID, layer_pattern="MMX"), "model.layer_pattern", "is MMX"),
        (replace(HYBRID, mamba_groups=3), "model.mamba_groups", "do not divide into 3 groups"),
        (replace(DECODER, learned_positions=4), "data.seq_len", "has 4 positions"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make_spec, model, path, message) -> None:
    problems = check(replace(make_spec({}), model=model))
    assert [problem.path for problem in problems] == [path]
    assert message in problems[0].message and problems[0].hint


@pytest.mark.parametrize("model", [with_experts(num_groups=4, top_groups=2), replace(HYBRID, layer_pattern="M-M")])
def test_sizes_that_fit_are_not(make_spec, model) -> None:
    assert check(replace(make_spec({}), model=model)) == []


def test_an_empty_pattern_spreads_each_kind() -> None:
    model = replace(HYBRID, mamba_layers=4, attention_layers=1, mlp_layers=4)
    assert model.layers == "M-M-*M-M-"


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"num_groups": 4, "top_groups": 4}, None),
        ({"num_groups": 8, "top_groups": 2}, None),
        ({"num_groups": 4, "top_groups": 5}, "type model.experts.top_groups=4 or less"),
        ({"num_groups": 8, "top_groups": 1}, "type model.experts.top_groups=2 or more"),
        ({"num_groups": 2, "top_groups": 1, "top_k": 4}, None),
        ({"num_groups": 2, "top_groups": 1, "top_k": 5}, "type model.experts.top_groups=2 or more"),
        ({"top_k": 8}, None),
        ({"expert_ffn_size": 17}, "type model.experts.expert_ffn_size=24"),
    ],
    ids=str,
)
def test_groups_of_experts_hold_what_a_token_visits(make_spec, changes, hint) -> None:
    problems = check(replace(make_spec({}), model=with_experts(**changes)))
    assert [problem.hint for problem in problems] == ([hint] if hint else [])


def test_a_table_of_positions_holds_the_sequence(make_spec) -> None:
    assert check(replace(make_spec({}), model=replace(DECODER, learned_positions=64))) == []
    (problem,) = check(replace(make_spec({}), model=replace(DECODER, learned_positions=63)))
    assert problem.hint == "type data.seq_len=63"
