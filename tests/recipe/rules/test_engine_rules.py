"""What can be planned but not trained is refused, never passed over."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.rules.check import check_built, check_engine
from trainspec_cli.recipe.structure import structure


def test_a_plain_recipe_is_trained(make_spec):
    assert check_engine(make_spec({})) == []


@pytest.mark.parametrize(
    ("path", "value", "choices"),
    [
        ("precision.matmul", "nvfp4", "compute or fp8"),
        ("precision.compute", "fp16", "bf16 or fp32 or auto"),
    ],
)
def test_a_value_that_only_the_planner_knows_is_refused(make_spec, path, value, choices):
    (problem,) = check_engine(make_spec({path: value}))
    assert problem.code == "unsupported"
    assert problem.message == f"`{path}` is {value}; this version trains with {choices}"
    assert problem.hint.startswith(f"type {path}={choices.split()[0]}, or trainspec plan")


def test_every_refusal_is_told_at_once(make_spec):
    problems = check_engine(make_spec({"layout.etp": 2, "precision.matmul": "nvfp4", "model.prediction_layers": 1}))
    assert {problem.path for problem in problems} == {"model.prediction_layers", "precision.matmul", "layout.etp"}


def test_layers_that_predict_further_tokens_are_not_built(make_spec):
    (problem,) = check_engine(make_spec({"model.prediction_layers": 1}))
    assert problem.hint == "type model.prediction_layers=0"


def test_hybrids_are_trained(make_spec):
    from trainspec_cli.recipe.records import to_plain

    plain = to_plain(make_spec({}))
    plain["model"] = {"family": "hybrid", "hidden_size": 64, "vocab_size": 100, "mamba_layers": 2}
    spec, problems = structure(plain)
    assert problems == []
    assert check_engine(spec) == []


@pytest.mark.parametrize(("nodes", "groups"), [(1, 3), (4, 2), (2, 4), (3, 3)])
def test_groups_take_whole_hosts_or_share_one(make_spec, nodes, groups):
    sizes = {"cluster.num_nodes": nodes, "cluster.devices_per_node": 12, "resilience.replica_groups": groups}
    assert check_engine(make_spec({"resilience.mode": "elastic"} | sizes)) == []


def test_a_host_with_parts_of_two_groups_is_refused(make_spec):
    sizes = {"cluster.num_nodes": 3, "cluster.devices_per_node": 2, "resilience.replica_groups": 2}
    (problem,) = check_engine(make_spec({"resilience.mode": "elastic"} | sizes))
    assert "3 nodes do not divide over 2 replica groups" in problem.message
    assert problem.hint == "type resilience.replica_groups=3 or 6"


def test_what_the_model_and_layout_alone_cannot_be_is_told_apart_from_where_it_runs(make_spec):
    """`fp16` is the planner's alone, and three nodes do not divide over two groups: neither is of the model."""
    elsewhere = {"precision.compute": "fp16", "cluster.num_nodes": 3, "resilience.mode": "elastic"}
    spec = make_spec(elsewhere)
    assert check_built(spec) == []
    assert {problem.path for problem in check_engine(spec)} == {"precision.compute", "resilience.replica_groups"}
    assert [problem.path for problem in check_built(make_spec({"layout.etp": 2}))] == ["layout.etp"]


CONV = {
    "family": "conv", "architecture": "resnet", "input_size": [32, 32], "widths": [8], "blocks": [1], "num_classes": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "path"), [({"compile": True}, "compile"), ({"resilience": {"mode": "elastic"}}, "resilience.mode")]
)
def test_a_convolutional_network_is_not_compiled_nor_made_elastic(data, changes, path):
    plain = data | {"model": CONV, "data": {"source": "phantom", "seq_len": 1}}
    spec, _ = structure(plain | changes)
    assert [problem.path for problem in check_engine(spec)] == [path]
    spec, _ = structure(plain)
    assert check_engine(spec) == []


def test_runs_of_other_frameworks_are_not_started(make_spec):
    (problem,) = check_engine(make_spec({"framework.name": "Abacus"}))
    assert (problem.path, problem.message[:23]) == ("framework", "`framework` is Abacus, ")
    assert check_engine(make_spec({"framework.name": "trainspec", "framework.counted": True})) == []


def test_a_pinned_layout_is_one_that_the_framework_has(make_spec):
    from trainspec_cli.recipe.rules.run import framework_has

    facts = {"framework.name": "Abacus", "framework.schedules": ["1f1b"], "framework.zero_stages": [1]}
    pinned = {"layout.pp": 2, "layout.pipeline_schedule": "zero_bubble", "layout.dp_shard": 2, "layout.zero_stage": 3}
    assert list(framework_has(make_spec(pinned))) == []
    problems = list(framework_has(make_spec(facts | pinned)))
    assert [problem.hint for problem in problems] == ["type layout.zero_stage=1", "type layout.pipeline_schedule=1f1b"]
    assert list(framework_has(make_spec(facts | pinned | {"layout.pp": 1, "layout.dp_shard": 1}))) == []
