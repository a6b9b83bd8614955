from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lab.drawing import slow_after
from lab.problems import assert_problems, words
from lab.recorded import Recorded

from trainspec_cli.recipe.field_types import Range, ranges_of
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import UNKNOWN, build, sections_of, to_plain
from trainspec_cli.recipe.rules.check import check, check_engine, check_machine, close_axes

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


REFUSALS = json.loads(Path(__file__).with_name("refusals.json").read_text())
"""Changes to a sound recipe, and each problem's code and path, in order; none where the changes are allowed."""


@pytest.mark.parametrize(
    ("path", "value", "parts"),
    [
        ("train.max_steps", 0, ["train.max_steps=1 or more"]),
        ("optim.beta1", 1, ["at least 0", "less than 1"]),
        ("data.tokenizer.vocab_size", 200, ["data.tokenizer.vocab_size=257 or more"]),
    ],
)
def test_ranges(make_spec, path: str, value: Any, parts: list[str]) -> None:
    assert_problems(check(make_spec({path: value})), ("out_of_range", path, f"`{path}` is {value};", *parts))


def sections_below(cls: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Every section with the prefix of its paths, optional ones and those of every model family too."""
    yield prefix, cls
    for name, hint in typing.get_type_hints(cls).items():
        for section in sections_of(hint):
            yield from sections_below(section, f"{prefix}{name}.")


def numbers_of(cls: type) -> Iterator[str]:
    """The fields that hold a number, or a list of them."""
    for name, hint in typing.get_type_hints(cls).items():
        members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
        members += tuple(typing.get_args(member)[0] for member in members if typing.get_origin(member) is tuple)
        if {int, float} & set(members):
            yield name


NUMBER_PATHS = sorted(
    {f"{prefix}{name}" for prefix, section in sections_below(RunSpec) for name in numbers_of(section)}
)


def test_every_number_of_a_spec_has_a_range() -> None:
    for _, section in sections_below(RunSpec):
        assert set(numbers_of(section)) == set(ranges_of(section)), section


ANY_FACTOR = "set layout.dp_shard=auto; with the other axes unchanged, it may be 1, 2"


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"layout.dp_shard": 3}, ["1 x 2 = 2 ", "dp_shard=3", ANY_FACTOR]),
        ({"layout.dp_shard": 4, "layout.dp_replicate": 1}, ["dp_shard=4", "makes 4", ANY_FACTOR]),
        ({"layout.dp_shard": 1, "layout.dp_replicate": 1}, ["every axis=1", "makes 1", ANY_FACTOR]),
        (
            {"layout.dp_shard": 3, "layout.dp_replicate": 3, "cluster.num_nodes": 2},
            ["2 x 2 = 4 ", "dp_replicate=3 x dp_shard=3", "makes 9", "divides 4", "cluster.devices_per_node"],
        ),
    ],
)
def test_what_does_not_divide(make_spec, changes: dict[str, Any], parts: list[str]) -> None:
    assert_problems(check(make_spec(changes)), ("not_divisible", "layout.dp_shard", *parts))


@pytest.mark.parametrize(
    "changes",
    [
        {"layout.dp_shard": 2},
        {"layout.dp_shard": 2, "layout.dp_replicate": 2, "cluster.num_nodes": 2},
        {"cluster.devices_per_node": "auto", "layout.dp_shard": 3},
    ],
)
def test_what_divides_or_is_left_to_the_machine(make_spec, changes: dict[str, Any]) -> None:
    assert check(make_spec(changes)) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"batching.global_batch_size": 7},
        {"batching.global_batch_size": 1},
        {"batching.micro_batch_size": 3},
        {"batching.micro_batch_size": 64},
        {"batching.global_batch_size": 9, "cluster.devices_per_node": 4},
        {"batching.global_batch_size": 9, "cluster.devices_per_node": 4, "layout.dp_shard": 2, "layout.tp": 2},
        {"batching.global_batch_size": 9, "cluster.devices_per_node": 8, "layout.pp": 2, "layout.cp": 2},
        {"resilience.mode": "elastic", "resilience.replica_groups": 3, "cluster.devices_per_node": 3},
        {"layout.pp": 2, "layout.pipeline_schedule": "interleaved", "batching.micro_batch_size": 8},
    ],
)
def test_any_batch_divides_over_any_number_of_ranks(make_spec, changes: dict[str, Any]) -> None:
    assert check(make_spec(changes)) == []


def test_a_tokenizer_fits_the_model(make_spec) -> None:
    assert_problems(
        check(make_spec({"data.tokenizer.vocab_size": 600})),
        ("out_of_range", "data.tokenizer.vocab_size", "model.vocab_size=600", "data.tokenizer.vocab_size=512"),
    )
    assert check(make_spec({"data.tokenizer.vocab_size": 300})) == []


def test_data_files(make_spec, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    for path in ("a.txt", "*.txt", "."):
        assert check(make_spec({"data.source": "text", "data.path": path})) == []
    for changes, *expected in (
        ({"source": "text", "path": "b.txt"}, "missing_file", "data.path", "b.txt;", str(tmp_path), "<the file, "),
        ({"source": "tokens", "path": "/no/where"}, "missing_file", "data.path", "/no/where;", "<the folder"),
        ({"source": "jsonl", "path": None}, "missing_value", "data.path", "data=jsonl", "set data.path="),
        ({"source": "python_stdlib", "path": "a.txt"}, "unsupported", "data.path", "a.txt", "data=text or data=jsonl"),
        ({"path": None, "tokenizer.path": "t.json"}, "missing_file", "data.tokenizer.path", "t.json;", str(tmp_path)),
    ):
        spec = make_spec({f"data.{key}": value for key, value in changes.items()})
        assert_problems(check(spec), tuple(expected))
    make_spec({"data.tokenizer.path": None})
    for source in ("tokens", "images", "volumes"):
        is_a_file = check(make_spec({"data.source": source, "data.path": "a.txt"}))
        assert_problems(is_a_file[:1], ("missing_file", "data.path", "a.txt;", f"no such folder in {tmp_path}"))
        missing = check(make_spec({"data.source": source, "data.path": None}))
        assert_problems(missing[:1], ("missing_value", "data.path", f"data={source} ", "a folder"))


def host(*gpus: str) -> Machine:
    return Machine(hostname="box", cpu_cores=2, memory_bytes=2**30, gpu_names=gpus)


def test_gpus_that_lack_are_the_machines_fault(make_spec) -> None:
    spec = make_spec({"cluster.device": "cuda"})
    (none,), (few,) = check_machine(spec, host()), check_machine(spec, host("H200"))
    assert none.environment and few.environment
    assert_problems([none], ("no_gpu", "cluster.device", "`cluster.device`", "box"))
    assert_problems(
        [few], ("too_few_gpus", "cluster.devices_per_node", "is 2", "box has 1", "set cluster.devices_per_node=1")
    )
    assert check_machine(spec, host("H200", "H200")) == []
    assert check_machine(make_spec({"cluster.device": "cpu"}), host()) == []


@pytest.mark.parametrize(
    ("device", "vendor", "gpus", "lacking"),
    [
        ("auto", "nvidia", (), ["no_gpu"]),
        ("auto", "nvidia", ("RTX 4090",), ["too_few_gpus"]),
        ("auto", "nvidia", ("RTX 4090",) * 2, []),
        ("auto", "cpu", (), []),
        ("auto", None, (), []),
        ("auto", None, ("RTX 4090",), ["too_few_gpus"]),
        ("cpu", "nvidia", (), []),
    ],
)
def test_an_accelerator_that_is_named_is_asked_for(make_spec, device, vendor, gpus, lacking) -> None:
    chip = (
        {"name": "RTX 4090", "vendor": vendor, "bf16_tflops": 165.0, "memory_gb": 24.0, "memory_tb_per_s": 1.0}
        if vendor
        else None
    )
    problems = check_machine(make_spec({"cluster.device": device, "cluster.accelerator": chip}), host(*gpus))
    assert [problem.code for problem in problems] == lacking
    assert all(problem.environment for problem in problems)
    if lacking == ["no_gpu"]:
        assert problems[0].path == "cluster.accelerator" and "cluster.device=cpu" in problems[0].hint


def test_a_package_that_lacks(make_spec, monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check_machine(make_spec({"tracking.tensorboard": True}), host())
    assert problem.environment
    assert_problems([problem], ("missing_package", "tracking.tensorboard", "pip install 'trainspec[tensorboard]'"))


MODELS = {
    "own": {"family": "own", "num_layers": 2, "hidden_size": 64, "vocab_size": 512, "block_params": 9},
    "hybrid": {"family": "hybrid", "hidden_size": 64, "vocab_size": 512, "mamba_layers": 2, "mamba_groups": 2},
    "conv": {"family": "conv", "architecture": "unet", "input_size": [16, 16], "widths": [8, 16]},
    "moe": {
        "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 160,
        "vocab_size": 512, "experts": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 48, "num_groups": 2},
    },
}  # fmt: skip
NUMBERS = st.sampled_from([-7, -1, 0, 1, 2, 3, 5, 64, 10_000])
LAYOUT = {"layout.pp": 2, "layout.tp": 2, "layout.cp": 2, "layout.ep": 2}


@pytest.mark.parametrize("model", slow_after(2, [None, *MODELS]))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wrong=st.dictionaries(st.sampled_from(NUMBER_PATHS), NUMBERS, min_size=1, max_size=3), spread=st.booleans())
def test_no_rule_stumbles_over_a_number_and_none_out_of_range_is_passed_over(make_spec, model, wrong, spread) -> None:
    spec = make_spec(LAYOUT if spread else {})
    if model:
        spec = replace(spec, model=build(RunSpec, {**to_plain(spec), "model": MODELS[model]})[0].model)  # type: ignore[union-attr]
    out_of_range = set()
    for path, number in wrong.items():
        names = path.split(".")
        *_, section = above = sections_above(spec, names)
        ranges = ranges_of(type(section)) if section is not None else {}
        if names[-1] in ranges and getattr(section, names[-1]) is not None:
            is_list = isinstance(getattr(section, names[-1]), tuple)
            spec = replaced(above, names, (number, 1) if is_list else number)
            out_of_range |= set() if ranges[names[-1]].holds(number) else {path}
    assert out_of_range <= {problem.path for problem in [*check(spec), *check_engine(spec)]}


def sections_above(spec: RunSpec, names: list[str]) -> list[Any]:
    """The sections that lead to a value; None for those that are left out, or of a kind without it."""
    return list(accumulate(names[:-1], lambda section, name: getattr(section, name, None), initial=spec))


def replaced(above: list[Any], names: list[str], value: Any) -> Any:
    for section, name in zip(reversed(above), reversed(names), strict=True):
        value = replace(section, **{name: value})
    return value


def test_a_family_may_do_without_some_sizes(make_spec) -> None:
    plain = to_plain(make_spec({}))
    sizes = {"hybrid": {"num_heads": 0, "ffn_size": 0}, "conv": {}}
    for family, without in sizes.items():
        spec, _ = build(RunSpec, {**plain, "model": MODELS[family] | without})
        assert [problem for problem in check(spec) if problem.code == "out_of_range"] == []
    spec, _ = build(RunSpec, {**plain, "model": MODELS["hybrid"] | {"hidden_size": 0, "head_dim": 0}})
    assert {problem.path for problem in check(spec)} == {"model.hidden_size", "model.head_dim"}
    spec, _ = build(RunSpec, {**plain, "model": MODELS["conv"] | {"widths": [8, 0]}})
    (problem,) = (problem for problem in check(spec) if problem.path == "model.widths")
    assert problem.code == "out_of_range" and "[8, 0]" in problem.message and "at least 1" in problem.message


def test_unknown_values_hide_no_faults_of_others(data) -> None:
    data["train"]["max_steps"] = "four"
    data["optim"] = {"lr": 0, "schedule": {"kind": "cosin"}}
    data["model"]["num_kv_heads"] = 3
    draft, mistyped = build(RunSpec, data)
    assert [problem.path for problem in mistyped] == ["optim.schedule.kind", "train.max_steps"]
    assert [problem.path for problem in check(draft)] == ["optim.lr", "model.num_kv_heads"]


def test_compiling_without_a_compiler_is_told_before_the_workers_start(make_spec, monkeypatch, tmp_path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = check_machine(make_spec({"compile": True, "cluster.device": "cpu"}), host())
    assert problem.environment
    assert_problems([problem], ("missing_compiler", "compile", "compile=false", "apt install g++"))
    assert check_machine(make_spec({"compile": False, "cluster.device": "cpu"}), host()) == []
    (tmp_path / "clang++").write_text("#!/bin/sh")
    (tmp_path / "clang++").chmod(0o755)
    assert check_machine(make_spec({"compile": True, "cluster.device": "cpu"}), host()) == []


@pytest.mark.parametrize("case", REFUSALS, ids=[json.dumps(case["changes"])[:60] for case in REFUSALS])
def test_refusals(make_spec, tmp_path, monkeypatch, case: dict[str, Any], recorded: Recorded) -> None:
    (tmp_path / "text.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    rules = {"check": check, "engine": check_engine}[case["rules"]]
    problems = rules(make_spec(case["changes"]))
    assert_problems(problems, *map(tuple, case["problems"]))
    recorded(words(problems))


def test_a_launch_sets_the_axes_beside_data_parallelism_to_1(make_spec) -> None:
    asked = {f"layout.{axis}": "auto" for axis in (*AXES, "etp")} | {"layout.tp": 2}
    layout = close_axes(make_spec(asked)).layout
    assert [getattr(layout, axis) for axis in (*AXES, "etp")] == ["auto", "auto", 1, 2, 1, 1, 1]


def test_axes_of_a_layout_that_is_not_known_stay_so(make_spec) -> None:
    unknown = replace(make_spec({}), layout=UNKNOWN)
    assert close_axes(unknown) is unknown


NUMBERS_OF_KINDS = [
    ("train.max_steps", [1], [0, -1]),
    ("optim.lr", [1e-9], [0, -1.0]),
    ("optim.weight_decay", [0, 0.5], [-0.5]),
    ("optim.beta1", [0, 0.99], [1, -0.1]),
    ("optim.schedule.decay_fraction", [0, 1], [-0.1, 1.1]),
    ("optim.schedule.final_lr_ratio", [0, 1], [-0.1, 1.1]),
    ("cluster.cost.utilisation", [0.01, 1], [0, 1.01]),
    ("data.heldout_fraction", [0.01, 0.99], [0, 1]),
    ("data.tokenizer.vocab_size", [257], [256]),
]


@pytest.mark.parametrize(("path", "allowed", "refused"), NUMBERS_OF_KINDS)
def test_the_ends_of_a_range(make_spec, path: str, allowed: list[float], refused: list[float]) -> None:
    for number in (*allowed, *refused):
        found = [problem.path for problem in check(make_spec({path: number})) if problem.code == "out_of_range"]
        assert (path in found) == (number in refused), number


def test_what_divides_may_not_be_0_and_what_may_be_left_out_may() -> None:
    """Sizes and counts that others are divided by, or that a run cannot do without."""
    needed = """
        model.num_layers model.hidden_size model.head_dim model.vocab_size
        data.seq_len batching.global_batch_size batching.micro_batch_size cluster.num_nodes cluster.devices_per_node
        layout.tp layout.pp layout.cp layout.ep layout.dp_shard layout.dp_replicate model.experts.num_experts
        model.experts.top_k model.mamba_groups model.mamba_head_dim resilience.replica_groups lora.alpha
        cluster.storage_gb_per_s cluster.reliability.mtbf_device_hours run.node_timeout_s optim.grad_clip_norm
        run.join_timeout_s
    """
    optional = """
        lora.rank optim.weight_decay optim.schedule.warmup_steps sample.temperature cluster.reliability.spare_nodes
        cluster.site.carbon_g_per_kwh model.attention_layers model.experts.shared_experts
        resilience.max_restarts_per_hour
    """
    ranges = dict(ranges_below(RunSpec))
    assert [path for path in needed.split() if ranges[path].holds(0) or not ranges[path].holds(1)] == []
    assert [path for path in optional.split() if not ranges[path].holds(0) or ranges[path].holds(-1)] == []


def ranges_below(cls: type, prefix: str = "") -> Iterator[tuple[str, Range]]:
    """Dotted path and range of every number, those of optional sections and of every model family too."""
    yield from ((f"{prefix}{name}", allowed) for name, allowed in ranges_of(cls).items())
    for name, hint in typing.get_type_hints(cls).items():
        for section in sections_of(hint):
            yield from ranges_below(section, f"{prefix}{name}.")


def test_what_a_machine_lacks_for_tables_fp8_and_memory_copies(make_spec, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parts = {"data.source": "parquet", "data.path": str(tmp_path), "data.validation": {"v": {"source": "arrow"}}}
    tables = check_machine(make_spec(parts | {"precision.matmul": "fp8", "tracking.wandb": True}), host())
    assert_problems(
        tables,
        ("missing_package", "tracking.wandb", " wandb ", "pip install 'trainspec[wandb]'"),
        ("missing_package", "data.source", " pyarrow ", "pip install 'trainspec[hf]'"),
        ("missing_package", "data.validation.v.source", " pyarrow ", "pip install 'trainspec[hf]'"),
        ("missing_package", "precision.matmul", " torchao ", "pip install 'trainspec[float8]'"),
    )
    assert {problem.environment for problem in tables} == {True}


def test_copies_in_memory_need_shared_memory(make_spec, monkeypatch) -> None:
    copies = make_spec({"checkpoint.memory_interval_steps": 2})
    assert check_machine(copies, host()) == []
    monkeypatch.setattr(Path, "is_dir", lambda folder: False)
    key = "checkpoint.memory_interval_steps"
    assert_problems(check_machine(copies, host()), ("no_shared_memory", key, f"{key}=null"))
    assert check_machine(make_spec({"checkpoint.memory_interval_steps": None}), host()) == []


@pytest.mark.parametrize("wanted", [{"checkpoint.keep_best": True}, {"train.early_stop_evals": 3}])
def test_what_follows_the_heldout_loss_needs_evaluations_and_one_replica_group(
    make_spec: Any, wanted: dict[str, object]
) -> None:
    (path,) = wanted
    assert_problems(check(make_spec(wanted)), ("missing_value", path, "train.eval_interval_steps=100"))
    evaluated = wanted | {"train.eval_interval_steps": 5}
    assert check(make_spec(evaluated)) == []
    groups = {"resilience.mode": "elastic", "resilience.replica_groups": 2, "cluster.devices_per_node": 2}
    assert ("unsupported", path) in {(one.code, one.path) for one in check(make_spec(evaluated | groups))}


@pytest.mark.parametrize(("name", "is_right"), [("baseline-2.1", True), ("", True), ("a/b", False), ("last", False)])
def test_a_runs_name_is_one_word_that_means_nothing_else(make_spec: Any, name: str, is_right: bool) -> None:
    assert [problem.code for problem in check(make_spec({"run.name": name}))] == [] if is_right else ["bad_name"]
