"""Backends that are unknown, of no use, or beyond this machine are refused, with what to type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from trainspec_cli.spec.recipe import kernels
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.kernels import KERNELS, TORCH, KernelSpec
from trainspec_cli.spec.recipe.layout import Layout
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.plan import Plan
from trainspec_cli.spec.rules import kernels as kernel_rules
from trainspec_cli.spec.rules.check import check, check_machine
from trainspec_cli.spec.rules.kernels import why_untried
from trainspec_cli.spec.structure import structure

Make = Callable[..., RunSpec]
CPU, GPU = Machine("here", 2, 2**34), Machine("here", 2, 2**34, gpu_names=("NVIDIA H200",) * 2)


def problems(spec: RunSpec, machine: Machine | None = None) -> list[str]:
    found = check(spec) if machine is None else check_machine(spec, machine)
    return [f"{problem.message} -> {problem.hint}" for problem in found]


def test_the_table_and_the_section_name_the_same_operations() -> None:
    assert set(KernelSpec().by_op) == set(KERNELS)
    assert all(backend == TORCH for backend in KernelSpec().by_op.values())


def test_an_unknown_backend_names_those_there_are(make_spec: Make) -> None:
    assert problems(make_spec({"kernels.rope": "halfs"})) == [
        "`kernels.rope` is 'halfs'; auto, torch, halves, compiled or liger is needed "
        "-> did you mean kernels.rope=halves?"
    ]


def test_an_unknown_operation_names_those_there_are(data) -> None:
    _, found = structure({**data, "kernels": {"ropes": "halves"}})
    assert [(problem.message, problem.hint) for problem in found] == [
        ("unknown key `kernels.ropes`", "did you mean `kernels.rope`?")
    ]


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
    assert told and f"type kernels.{op}=torch" in told[0]


def test_auto_asks_for_no_operation_in_particular(make_spec: Make) -> None:
    assert problems(make_spec({f"kernels.{op}": "auto" for op in KERNELS})) == []


def test_a_vocabulary_that_is_cut(make_spec: Make) -> None:
    (told,) = problems(make_spec({"kernels.linear_cross_entropy": "full", "layout.tp": 2}))
    assert "needs the whole vocabulary" in told
    assert problems(make_spec({"kernels.linear_cross_entropy": "chunks_16mib", "layout.tp": 2})) == []


def test_cuda_kernels_are_refused_on_a_cpu(make_spec: Make) -> None:
    assert problems(make_spec({"kernels.rms_norm": "liger"}), CPU) == [
        "`kernels.rms_norm` is liger: it runs on CUDA alone -> type kernels.rms_norm=torch"
    ]


def test_a_missing_package_names_the_extra(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.importlib.util, "find_spec", lambda _name: None)
    told = problems(make_spec({"kernels.rms_norm": "liger"}), GPU)
    assert told == [
        "`kernels.rms_norm` is liger: the package liger_kernel is not installed (pip install 'trainspec[kernels]') "
        "-> type pip install 'trainspec[kernels]', or kernels.rms_norm=torch"
    ]


def test_a_missing_compiler(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rules, "find_compiler", lambda: None)
    (told,) = problems(make_spec({"kernels.rope": "compiled"}), CPU)
    assert "no C++ compiler (g++, clang++) is on the PATH" in told


def test_an_older_torch(make_spec: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_rules, "version", lambda _name: "2.11.0+cpu")
    (told,) = problems(make_spec({"kernels.linear_cross_entropy": "native"}), CPU)
    assert "it needs torch 2.13" in told


def test_nothing_is_fused_under_the_eyes_of_selective_recomputation(make_spec: Make) -> None:
    changes = {"kernels.rope": "compiled", "recompute": "selective"}
    (told,) = problems(make_spec(changes))
    assert "type kernels.rope=torch, recompute=full or compile=true" in told
    assert problems(make_spec({**changes, "recompute": "full"})) == []
    assert problems(make_spec({**changes, "kernels.rope": "halves"})) == []


def planned(spec: RunSpec) -> Plan:
    return Plan(spec, Layout(), "cpu", 1, 1, "fp32", 8, 1, "none", "none", 0, 0.0)


@pytest.mark.parametrize(
    ("op", "name", "changes", "values", "words"),
    [
        ("attention", "math", {}, {}, "it takes more memory than the plan counts"),
        ("rope", "liger", {}, {}, "CUDA alone"),
        ("rope", "compiled", {"compile": True}, {}, "blocks are compiled as they are"),
        ("rope", "compiled", {}, {"recompute": "selective"}, "recompute=selective follows single operations"),
        ("linear_cross_entropy", "native", {}, {"layout": Layout(tp=2)}, "layout.tp cuts the vocabulary"),
    ],
)
def test_what_auto_does_not_consider(op: str, name: str, changes, values, words: str, make_spec: Make) -> None:
    assert words in why_untried(replace(planned(make_spec(changes)), **values), op, name)


def test_what_auto_considers(make_spec: Make) -> None:
    assert why_untried(planned(make_spec({})), "rope", "halves") == ""
