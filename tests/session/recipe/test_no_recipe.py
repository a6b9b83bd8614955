"""A plan of a model on a cluster, without a recipe: the defaults, and the errors."""

from __future__ import annotations

import pytest
from lab.problems import raises

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.session.recipe.load import load_for_planning, with_defaults


def spec_of(*arguments: str) -> RunSpec:
    return load_for_planning(with_defaults(arguments)[0]).spec


def test_a_model_on_a_cluster_is_a_run_of_twenty_tokens_a_parameter() -> None:
    arguments, defaults = with_defaults(["model=llama3_8b", "cluster=mi300x", "cluster.num_nodes=2"])
    assert defaults == ("data.seq_len=4096", "batching.global_batch_size=1024", "train.tokens=1.61e+11")
    spec = load_for_planning(arguments).spec
    assert (spec.model.name, spec.cluster.name, spec.cluster.num_nodes) == ("llama3_8b", "mi300x", 2)
    assert spec.train.max_steps * 2**22 == pytest.approx(20 * 8.03e9, rel=0.01)
    assert (spec.layout.tp, spec.layout.pp, spec.recompute, spec.compile) == ("auto", "auto", "auto", True)


def test_what_is_given_is_not_replaced() -> None:
    _, defaults = with_defaults(["model=llama3_8b", "data.seq_len=8192", "train.max_steps=10"])
    assert defaults == ("batching.global_batch_size=512",)
    spec = spec_of("model=llama3_8b", "data.seq_len=8192", "train.max_steps=10", "batching.global_batch_size=3")
    assert (spec.data.seq_len, spec.train.max_steps, spec.batching.global_batch_size) == (8192, 10, 3)
    assert with_defaults(["recipe=tiny", "model=llama3_8b"]) == (["recipe=tiny", "model=llama3_8b"], ())


def test_samples_are_as_long_as_the_model_allows() -> None:
    assert spec_of("model=gpt3_175b", "cluster=b200").data.seq_len == 2048
    pictures = spec_of("model=resnet50", "data=images", "cluster=h100")
    assert pictures.train.max_steps * pictures.batching.global_batch_size == pytest.approx(90 * 1.28e6, rel=0.01)


def test_neither_a_recipe_nor_a_model_is_refused() -> None:
    with raises(RecipeError, "missing_value", path="recipe") as raised:
        with_defaults(["cluster=h100"])
    assert "model=NAME cluster=NAME" in raised.value.problems[0].hint


def test_a_wrong_model_is_reported_where_it_stands() -> None:
    with pytest.raises(RecipeError) as raised:
        spec_of("model=nix", "cluster=h100")
    assert [(problem.code, problem.where()) for problem in raised.value.problems] == [
        ("unknown_option", "command line:1")
    ]
