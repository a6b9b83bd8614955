"""Recipes that can be planned but not trained are refused."""

from __future__ import annotations

import pytest
from lab.problems import assert_problems

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build, to_plain
from trainspec_cli.recipe.rules.check import check_built, check_engine, check_machine
from trainspec_cli.recipe.rules.run import framework_has


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
    choice = f"set {path}={choices.split()[0]}"
    problems = check_engine(make_spec({path: value}))
    assert_problems(problems, ("unsupported", path, f"`{path}` is {value};", choices, choice, "trainspec plan"))


def test_every_refusal_is_told_at_once(make_spec):
    changes = {"layout.etp": 2, "precision.matmul": "nvfp4", "model.prediction_layers": 1, "layout.cp": 2}
    problems = check_engine(make_spec(changes))
    assert {problem.path for problem in problems} == {"layout.cp", "precision.matmul", "layout.etp"}


@pytest.mark.parametrize("excluded", [{"layout.cp": 2}, {"lora.rank": 4}, {"model.learned_positions": 4096}])
def test_what_prediction_layers_do_not_support_is_refused(make_spec, excluded):
    problems = check_engine(make_spec({"model.prediction_layers": 1, **excluded}))
    assert [(problem.code, problem.path) for problem in problems] == [("unsupported", *excluded)]


def test_hybrids_are_trained(make_spec):
    plain = to_plain(make_spec({}))
    plain["model"] = {"family": "hybrid", "hidden_size": 64, "vocab_size": 100, "mamba_layers": 2}
    spec, problems = build(RunSpec, plain)
    assert problems == []
    assert check_engine(spec) == []


@pytest.mark.parametrize(("nodes", "groups"), [(1, 3), (4, 2), (2, 4), (3, 3)])
def test_groups_take_whole_hosts_or_share_one(make_spec, nodes, groups):
    sizes = {"cluster.num_nodes": nodes, "cluster.devices_per_node": 12, "resilience.replica_groups": groups}
    assert check_engine(make_spec({"resilience.mode": "elastic"} | sizes)) == []


def test_what_the_model_and_layout_alone_cannot_be_is_told_apart_from_where_it_runs(make_spec):
    """`fp16` is the planner's alone, and three nodes do not divide over two groups: neither is of the model."""
    elsewhere = {"precision.compute": "fp16", "cluster.num_nodes": 3, "resilience.mode": "elastic"}
    spec = make_spec(elsewhere)
    assert check_built(spec) == []
    assert {problem.path for problem in check_engine(spec)} == {"precision.compute", "resilience.replica_groups"}
    assert [problem.path for problem in check_built(make_spec({"layout.etp": 2}))] == ["layout.etp"]


@pytest.mark.parametrize(
    ("changes", "path"), [({"compile": True}, "compile"), ({"resilience": {"mode": "elastic"}}, "resilience.mode")]
)
def test_a_convolutional_network_is_not_compiled_nor_made_elastic(data, changes, path):
    plain = data | {"model": RESNET, "data": {"source": "phantom", "seq_len": 1}}
    spec, _ = build(RunSpec, plain | changes)
    assert [problem.path for problem in check_engine(spec)] == [path]
    spec, _ = build(RunSpec, plain)
    assert check_engine(spec) == []


def test_runs_of_other_frameworks_are_not_started(make_spec):
    (problem,) = check_engine(make_spec({"framework.name": "Abacus"}))
    assert (problem.path, problem.message[:23]) == ("framework", "`framework` is Abacus, ")
    assert check_engine(make_spec({"framework.name": "trainspec", "framework.counted": True})) == []


def test_a_pinned_layout_is_one_that_the_framework_has(make_spec):
    facts = {"framework.name": "Abacus", "framework.schedules": ["1f1b"], "framework.zero_stages": [1]}
    pinned = {"layout.pp": 2, "layout.pipeline_schedule": "zero_bubble", "layout.dp_shard": 2, "layout.zero_stage": 3}
    assert list(framework_has(make_spec(pinned))) == []
    problems = list(framework_has(make_spec(facts | pinned)))
    hints = [problem.hint.removeprefix("set ") for problem in problems]
    assert hints == ["layout.zero_stage=1", "layout.pipeline_schedule=1f1b"]
    assert list(framework_has(make_spec(facts | pinned | {"layout.pp": 1, "layout.dp_shard": 1}))) == []


# Convolutional networks: which are trained, and on what.


RESNET = {
    "family": "conv", "architecture": "resnet", "input_size": [32, 32], "widths": [8], "blocks": [1], "num_classes": 4,
}  # fmt: skip
UNET = {"family": "conv", "architecture": "unet", "input_size": [16, 16, 16], "widths": [8, 16], "num_classes": 3}


@pytest.fixture
def told(make_spec):
    """The paths and messages of what is wrong with a model on some data in some layout."""

    def check(model, data=None, layout=None) -> list[tuple[str, str]]:
        plain = to_plain(make_spec({}))
        if model is not None:
            plain["model"] = model
        plain["data"] = {**plain["data"], "source": "phantom", "seq_len": 1, "path": None, **(data or {})}
        plain["layout"] |= layout or {}
        spec, problems = build(RunSpec, plain)
        assert problems == []
        return [(problem.path, problem.message) for problem in check_engine(spec)]

    return check


@pytest.mark.parametrize("model", [RESNET, UNET, {**UNET, "input_size": [16, 32]}])
def test_resnets_and_unets_are_trained(told, model):
    assert told(model) == []


def test_a_detector_is_refused(told):
    ((path, message),) = told({**RESNET, "architecture": "maskrcnn"})
    assert path == "model.architecture"
    assert all(word in message for word in ("resnet", "unet", "maskrcnn"))


@pytest.mark.parametrize(
    ("axis", "reason"), [("tp", "not sharded"), ("cp", "no sequence"), ("pp", "differ in shape"), ("ep", "experts")]
)
def test_convolutions_are_spread_over_data_alone(told, axis, reason):
    found = told(RESNET, layout={axis: 2})
    assert found and found[0][0] == f"layout.{axis}"
    assert reason in found[0][1]


def test_text_and_images_are_not_mixed_up(told):
    ((path, message),) = told(RESNET, {"source": "python_stdlib"})
    assert path == "data.source" and "data=python_stdlib is text" in message
    ((path, message),) = told(None)
    assert path == "data.source" and "data=phantom has no tokens" in message
    ((path, _),) = told(RESNET, {"seq_len": 64})
    assert path == "data.seq_len"


def test_stages_have_a_width_and_a_count(told):
    ((path, _),) = told({**RESNET, "widths": [8, 16]})
    assert path == "model.blocks"


# Products in fp8.


FP8 = {"precision.matmul": "fp8"}


def test_a_decoder_is(make_spec):
    assert check_engine(make_spec(FP8)) == []


@pytest.mark.parametrize(
    ("changes", "path", "message"),
    [
        ({"layout.pp": 2, "layout.pipeline_schedule": "zbv", "model.num_layers": 4}, "layout.pipeline_schedule", "zbv"),
        ({"model.ffn_size": 168}, "model.ffn_size", "168"),
        ({"layout.tp": 2, "model.ffn_size": 176}, "model.ffn_size", "a side of 88"),
    ],
)
def test_what_is_not(make_spec, changes, path, message):
    (problem,) = check_engine(make_spec(FP8 | changes))
    assert (problem.code, problem.path) == ("unsupported", path)
    assert message in problem.message
    assert "precision.matmul=compute" in problem.hint


def test_a_gpu_without_fp8_is_told_and_a_cpu_emulates(make_spec):
    machine = Machine("node", cpu_cores=2, memory_bytes=2**34)
    assert check_machine(make_spec(FP8), machine) == []
    old = Machine("node", 2, 2**34, gpu_names=("NVIDIA A100-SXM4-80GB",) * 2, bf16=True)
    (problem,) = check_machine(make_spec(FP8), old)
    assert (problem.code, problem.environment) == ("no_fp8", True)
    assert check_machine(make_spec(FP8), Machine("node", 2, 2**34, gpu_names=("NVIDIA H100",) * 2, fp8=True)) == []


def test_torchao_may_lack(make_spec, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "torchao" else object())
    problems = check_machine(make_spec(FP8), Machine("node", 2, 2**34))
    assert_problems(problems, ("missing_package", "precision.matmul", "pip install 'trainspec[float8]'"))
