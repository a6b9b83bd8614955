"""Backends that are unknown, of no use, or beyond this machine are refused, with what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import metadata

import pytest
from lab.problems import assert_problems

from trainspec_cli.recipe.keys import kernels
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import KERNELS
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.records import build
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.rules import check as kernel_rules
from trainspec_cli.recipe.rules.check import backend_is_used, check, check_machine, find_compiler, why_untried

Make = Callable[..., RunSpec]
CPU, GPU = Machine("here", 2, 2**34), Machine("here", 2, 2**34, gpu_names=("NVIDIA H200",) * 2)


def problems(spec: RunSpec, machine: Machine | None = None) -> list[str]:
    found = check(spec) if machine is None else check_machine(spec, machine)
    return [f"{problem.message} -> {problem.hint}" for problem in found]


def test_an_unknown_operation_names_those_there_are(data) -> None:
    _, found = build(RunSpec, {**data, "kernels": {"ropes": "halves"}})
    assert_problems(found, ("unknown_key", "kernels.ropes", "`kernels.ropes`", "`kernels.rope`?"))


@pytest.mark.parametrize(
    ("changes", "op"),
    [
        ({"kernels.ssd_scan": "block_64"}, "ssd_scan"),
        ({"kernels.grouped_matmul": "loop"}, "grouped_matmul"),
        ({"kernels.adamw": "for_loop", "optim.name": "sgd"}, "adamw"),
        ({"kernels.attention": "flash", "layout.cp": 2}, "attention"),
    ],
)
def test_a_backend_of_an_operation_that_the_run_has_not(changes, op: str, make_spec: Make) -> None:
    told = [told for told in problems(make_spec(changes)) if "no such operation" in told]
    assert told and f"set kernels.{op}=torch" in told[0]


def test_auto_asks_for_no_operation_in_particular(make_spec: Make) -> None:
    assert problems(make_spec({f"kernels.{op}": "auto" for op in KERNELS})) == []


@pytest.mark.parametrize(
    ("changes", "machine", "lacking", "told"),
    [
        (
            {"kernels.rms_norm": "liger"},
            GPU,
            "package",
            "or kernels.rms_norm=torch",
        ),
        # A package that no device here could use would not help.
        (
            {"kernels.rms_norm": "liger"},
            CPU,
            "package",
            "only on CUDA -> set kernels.rms_norm=torch",
        ),
        ({"kernels.rope": "compiled"}, CPU, "compiler", "C++ compiler (g++, clang++)"),
        ({"kernels.rope": "halves"}, CPU, "compiler", ""),
        ({"kernels.linear_cross_entropy": "native"}, CPU, "2.11.0+cpu", "it needs torch 2.13"),
        ({"kernels.linear_cross_entropy": "native"}, CPU, "2.13.0", ""),
        ({"kernels.rope": "halves"}, CPU, "2.9.1", "it needs torch 2.11"),
    ],
)
def test_what_a_machine_lacks_for_a_kernel(
    changes, machine: Machine, lacking: str, told: str, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacking == "package":
        monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _name: None)
    elif lacking == "compiler":
        monkeypatch.setattr(kernel_rules, "find_compiler", lambda: None)
    else:
        monkeypatch.setattr(metadata, "version", lambda _name: lacking)
    found = problems(make_spec(changes), machine)
    assert len(found) == bool(told) and all(told in words for words in found)


def planned(spec: RunSpec) -> Plan:
    return Plan(spec, Layout(), "cpu", 1, 1, "fp32", 8, 1, "none", "none", 0, 0.0)


@pytest.mark.parametrize(
    ("op", "name", "changes", "values", "words"),
    [
        ("attention", "math", {}, {}, "more memory"),
        ("rope", "liger", {}, {}, "only on CUDA"),
        ("rope", "compiled", {"compile": True}, {}, "compiled blocks"),
        ("rope", "compiled", {}, {"recompute": "selective"}, "recompute=selective"),
        ("linear_cross_entropy", "native", {}, {"layout": Layout(tp=2)}, "layout.tp shards the vocabulary"),
    ],
)
def test_what_auto_does_not_consider(op: str, name: str, changes, values, words: str, make_spec: Make) -> None:
    assert words in why_untried(replace(planned(make_spec(changes)), **values), op, name)


HYBRID = {
    "family": "hybrid", "hidden_size": 64, "vocab_size": 512, "mamba_layers": 2, "attention_layers": 1, "num_heads": 4,
    "num_kv_heads": 2, "head_dim": 16,
}  # fmt: skip
RESNET = {"family": "conv", "architecture": "resnet", "input_size": [32, 32], "widths": [8], "blocks": [1]}
EXPERTS = {"model.experts": {"num_experts": 8, "top_k": 2, "expert_ffn_size": 16}}


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({}, {"attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy", "adamw"}),
        ({"optim.name": "sgd"}, {"attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy"}),
        (EXPERTS, {"attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy", "adamw", "grouped_matmul"}),
        ({"model.learned_positions": 64}, {"attention", "rms_norm", "swiglu", "linear_cross_entropy", "adamw"}),
        ({"layout.cp": 2}, {"rms_norm", "swiglu", "rope", "linear_cross_entropy", "adamw"}),
        (
            {"layout.cp": 2, "layout.context_method": "ulysses"},
            {"attention", "rms_norm", "swiglu", "rope", "linear_cross_entropy", "adamw"},
        ),
    ],
    ids=["plain", "sgd", "experts", "learned_positions", "ring", "ulysses"],
)
def test_the_operations_of_a_decoder(changes, used: set[str], make_spec: Make) -> None:
    spec = make_spec(changes)
    assert {op for op in KERNELS if backend_is_used(spec, op)} == used


def test_the_operations_of_other_families(data) -> None:
    hybrid, _ = build(RunSpec, {**data, "model": HYBRID})
    assert hybrid is not None
    used = {op for op in KERNELS if backend_is_used(hybrid, op)}
    assert "ssd_scan" in used and not used & {"rope", "grouped_matmul"}
    images, _ = build(RunSpec, {**data, "model": RESNET})
    assert images is not None
    assert {op for op in KERNELS if backend_is_used(images, op)} == {"adamw"}


@pytest.mark.parametrize(
    ("device", "machine", "refused"),
    [("cpu", GPU, True), ("auto", GPU, False), ("auto", CPU, True), ("cuda", GPU, False)],
)
def test_a_cuda_kernel_runs_where_the_run_does(device: str, machine: Machine, refused: bool, make_spec: Make) -> None:
    told = problems(make_spec({"kernels.attention": "efficient", "cluster.device": device}), machine)
    assert any("only on CUDA" in words for words in told) is refused


@pytest.mark.parametrize(
    ("op", "name", "changes", "values"),
    [
        ("rope", "compiled", {"compile": False}, {"recompute": "full"}),
        ("rope", "halves", {"compile": True}, {}),
        ("linear_cross_entropy", "chunks_16mib", {}, {"layout": Layout(tp=2)}),
        ("rope", "compiled", {}, {}),
        ("attention", "efficient", {}, {"device": "cuda"}),
        ("rope", "halves", {"compile": False}, {"recompute": "selective"}),
        ("attention", "flex", {"compile": True}, {"recompute": "selective", "device": "cuda"}),
    ],
)
def test_auto_considers_what_nothing_stands_against(
    op: str, name: str, changes, values, make_spec: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_rules, "find_compiler", lambda: "/usr/bin/g++")
    assert why_untried(replace(planned(make_spec(changes)), **values), op, name) == ""


def test_the_compiler_is_the_one_of_the_environment_first(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mine", "clang++", "g++"):
        (tmp_path / name).write_text("#!/bin/sh")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "mine")
    assert find_compiler() == str(tmp_path / "mine")
    monkeypatch.delenv("CXX")
    assert find_compiler() == str(tmp_path / "g++")


def test_auto_leaves_out_what_needs_a_compiler(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rules, "find_compiler", lambda: None)
    assert why_untried(planned(make_spec({})), "rope", "halves") == ""
    assert "no C++ compiler" in why_untried(planned(make_spec({})), "rope", "compiled")
