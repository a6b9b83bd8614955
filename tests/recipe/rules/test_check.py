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

from trainspec_cli.recipe.field_types import Range, ranges_of
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import UNKNOWN, build, sections_of, to_plain
from trainspec_cli.recipe.rules.check import check, check_engine, check_machine, close_axes

AXES = ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep")


REFUSALS = json.loads(Path(__file__).with_name("refusals.json").read_text())
"""What changes to a sound recipe are refused for: each problem's code, path, message and hint, in order; none where
the changes are allowed."""


def told(problems) -> list[tuple[str, str, str, str]]:
    return [(problem.code, problem.path, problem.message, problem.hint) for problem in problems]


@pytest.mark.parametrize(
    ("path", "value", "message", "hint"),
    [
        ("train.max_steps", 0, "`train.max_steps` is 0; expected a whole number of at least 1",
         "set train.max_steps=1 or more"),
        ("optim.beta1", 1, "`optim.beta1` is 1; expected a number of at least 0 and less than 1", ""),
        ("data.tokenizer.vocab_size", 200,
         "`data.tokenizer.vocab_size` is 200; expected a whole number of at least 257",
         "set data.tokenizer.vocab_size=257 or more"),
    ],
)  # fmt: skip
def test_ranges(make_spec, path: str, value: Any, message: str, hint: str) -> None:
    assert told(check(make_spec({path: value}))) == [("out_of_range", path, message, hint)]


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


DIVISION = [
    ({"layout.dp_shard": 3}, "layout.dp_shard",
     "the cluster has 1 x 2 = 2 processes (nodes x devices), but the layout asks for dp_shard=3, "
     "which does not divide the processes",
     "set layout.dp_shard=auto; with the other axes unchanged, it may be 1, 2"),
    ({"layout.dp_shard": 4, "layout.dp_replicate": 1}, "layout.dp_shard",
     "the cluster has 1 x 2 = 2 processes (nodes x devices), but the layout asks for dp_shard=4, which makes 4",
     "set layout.dp_shard=auto; with the other axes unchanged, it may be 1, 2"),
    ({"layout.dp_shard": 1, "layout.dp_replicate": 1}, "layout.dp_shard",
     "the cluster has 1 x 2 = 2 processes (nodes x devices), but the layout asks for every axis=1, which makes 1",
     "set layout.dp_shard=auto; with the other axes unchanged, it may be 1, 2"),
    ({"layout.dp_shard": 3, "layout.dp_replicate": 3, "cluster.num_nodes": 2}, "layout.dp_shard",
     "the cluster has 2 x 2 = 4 processes (nodes x devices), but the layout asks for dp_replicate=3 x dp_shard=3, "
     "which makes 9", "choose axes whose product divides 4, or change cluster.devices_per_node"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "message", "hint"), DIVISION)
def test_what_does_not_divide(make_spec, changes: dict[str, Any], path: str, message: str, hint: str) -> None:
    assert told(check(make_spec(changes))) == [("not_divisible", path, message, hint)]


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
    assert told(check(make_spec({"data.tokenizer.vocab_size": 600}))) == [
        ("out_of_range", "data.tokenizer.vocab_size",
         "a tokenizer of 600 tokens does not fit a model with `model.vocab_size` 512",
         "set model.vocab_size=600, or data.tokenizer.vocab_size=512")
    ]  # fmt: skip
    assert check(make_spec({"data.tokenizer.vocab_size": 300})) == []


def test_data_files(make_spec, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("x")
    for path in ("a.txt", "*.txt", "."):
        assert check(make_spec({"data.source": "text", "data.path": path})) == []
    assert told(check(make_spec({"data.path": "b.txt"}))) == [
        ("missing_file", "data.path", f"`data.path` is b.txt; no such file, folder or glob in {tmp_path}",
         "set data.path=<the file, folder or glob's path>")
    ]  # fmt: skip
    assert told(check(make_spec({"data.source": "tokens", "data.path": "/no/where"}))) == [
        ("missing_file", "data.path", "`data.path` is /no/where; no such folder",
         "set data.path=<the folder's path>")
    ]  # fmt: skip
    for source in ("tokens", "images", "volumes"):
        is_a_file = check(make_spec({"data.source": source, "data.path": "a.txt"}))
        message = f"`data.path` is a.txt; no such folder in {tmp_path}"
        assert message in [problem.message for problem in is_a_file]
        missing = check(make_spec({"data.source": source, "data.path": None}))
        assert f"`data.path` is null; data={source} reads a folder" in [problem.message for problem in missing]
    assert told(check(make_spec({"data.source": "jsonl", "data.path": None}))) == [
        ("missing_value", "data.path", "`data.path` is null; data=jsonl reads a file, folder or glob",
         "set data.path=<path>")
    ]  # fmt: skip
    assert told(check(make_spec({"data.source": "python_stdlib", "data.path": "a.txt"}))) == [
        ("unsupported", "data.path", "`data.path` is a.txt, but data=python_stdlib reads no file",
         "set data=text or data=jsonl")
    ]  # fmt: skip
    assert told(check(make_spec({"data.path": None, "data.tokenizer.path": "t.json"}))) == [
        ("missing_file", "data.tokenizer.path", f"`data.tokenizer.path` is t.json; no such file in {tmp_path}",
         "set data.tokenizer.path=<the file's path>")
    ]  # fmt: skip


def host(*gpus: str) -> Machine:
    return Machine(hostname="box", cpu_cores=2, memory_bytes=2**30, gpu_names=gpus)


def test_gpus_that_lack_are_the_machines_fault(make_spec) -> None:
    spec = make_spec({"cluster.device": "cuda"})
    (none,), (few,) = check_machine(spec, host()), check_machine(spec, host("H200"))
    assert (none.code, none.environment, few.code, few.environment) == ("no_gpu", True, "too_few_gpus", True)
    assert none.message == "`cluster.device` is cuda, but box has no GPU"
    assert few.message == "`cluster.devices_per_node` is 2, but box has 1 GPUs"
    assert few.hint == "set cluster.devices_per_node=1, or auto"
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
    assert (problem.code, problem.environment) == ("missing_package", True)
    assert problem.hint == "run pip install 'trainspec[tensorboard]'"


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
    assert ("model.widths", "`model.widths` is [8, 0]; expected numbers of at least 1") in {
        (problem.path, problem.message) for problem in check(spec)
    }


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
    assert (problem.code, problem.environment) == ("missing_compiler", True)
    assert problem.hint == "set compile=false, or install one (apt install g++)"
    assert check_machine(make_spec({"compile": False, "cluster.device": "cpu"}), host()) == []
    (tmp_path / "clang++").write_text("#!/bin/sh")
    (tmp_path / "clang++").chmod(0o755)
    assert check_machine(make_spec({"compile": True, "cluster.device": "cpu"}), host()) == []


@pytest.mark.parametrize("case", REFUSALS, ids=[json.dumps(case["changes"])[:60] for case in REFUSALS])
def test_refusals(make_spec, tmp_path, monkeypatch, case: dict[str, Any]) -> None:
    (tmp_path / "text.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    rules = {"check": check, "engine": check_engine}[case["rules"]]
    assert told(rules(make_spec(case["changes"]))) == [tuple(problem) for problem in case["problems"]]


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
    assert told(tables) == [
        ("missing_package", "tracking.wandb", "`tracking.wandb` is true, but the package wandb is not installed",
         "run pip install 'trainspec[wandb]'"),
        ("missing_package", "data.source", "`data.source` is parquet, but the package pyarrow is not installed",
         "run pip install 'trainspec[hf]'"),
        ("missing_package", "data.validation.v.source",
         "`data.validation.v.source` is arrow, but the package pyarrow is not installed",
         "run pip install 'trainspec[hf]'"),
        ("missing_package", "precision.matmul", "`precision.matmul` is fp8, but the package torchao is not installed",
         "run pip install 'trainspec[float8]'"),
    ]  # fmt: skip
    assert {problem.environment for problem in tables} == {True}


def test_copies_in_memory_need_shared_memory(make_spec, monkeypatch) -> None:
    copies = make_spec({"checkpoint.memory_interval_steps": 2})
    assert check_machine(copies, host()) == []
    monkeypatch.setattr(Path, "is_dir", lambda folder: False)
    (problem,) = check_machine(copies, host())
    assert (problem.code, problem.hint) == ("no_shared_memory", "set checkpoint.memory_interval_steps=null")
    assert check_machine(make_spec({"checkpoint.memory_interval_steps": None}), host()) == []


@pytest.mark.parametrize("wanted", [{"checkpoint.keep_best": True}, {"train.early_stop_evals": 3}])
def test_what_follows_the_heldout_loss_needs_evaluations_and_one_replica_group(
    make_spec: Any, wanted: dict[str, object]
) -> None:
    (path,) = wanted
    (problem,) = check(make_spec(wanted))
    assert (problem.code, problem.path) == ("missing_value", path)
    assert problem.hint == "set train.eval_interval_steps=100, or another number"
    evaluated = wanted | {"train.eval_interval_steps": 5}
    assert check(make_spec(evaluated)) == []
    groups = {"resilience.mode": "elastic", "resilience.replica_groups": 2, "cluster.devices_per_node": 2}
    assert ("unsupported", path) in {(one.code, one.path) for one in check(make_spec(evaluated | groups))}


@pytest.mark.parametrize(("name", "is_right"), [("baseline-2.1", True), ("", True), ("a/b", False), ("last", False)])
def test_a_runs_name_is_one_word_that_means_nothing_else(make_spec: Any, name: str, is_right: bool) -> None:
    assert [problem.code for problem in check(make_spec({"run.name": name}))] == [] if is_right else ["bad_name"]
