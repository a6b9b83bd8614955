"""Kernels as an axis of the matrix: which are measured on this chip, and in which families and layouts."""

from __future__ import annotations

import pytest

from trainspec_cli.recipe.keys.kernels import KERNELS, TORCH
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.rules.check import lacking
from trainspec_cli.wings.certify import families
from trainspec_cli.wings.certify.cases import (
    Case,
    build_plan,
    build_spec,
    features_here,
    kernel_cases,
    refusals,
)
from trainspec_cli.wings.certify.judge import checks


@pytest.mark.clause("KERN-1", "KERN-2")
@pytest.mark.parametrize("on_gpu", [False, True])
def test_every_kernel_of_this_chip_is_measured(on_gpu: bool) -> None:
    found = {
        case.kernel
        for case in (
            *kernel_cases(4, features_here(on_gpu=on_gpu)),
            *kernel_cases(4, features_here(on_gpu=on_gpu), of_updates=True),
        )
    }
    here = {
        (operation, name)
        for operation, all_backends in KERNELS.items()
        for name, backend in all_backends.items()
        if name != TORCH and not lacking(backend, on_gpu=on_gpu)
    }
    assert found == here
    assert ("attention", "cudnn") in here if on_gpu else ("attention", "cudnn") not in here


def test_a_kernel_is_measured_in_one_process_in_every_family_that_has_its_operation() -> None:
    alone = {
        (case.family, case.kernel) for case in kernel_cases(2, features_here(on_gpu=False)) if case.layout == Layout()
    }
    assert ("windowed", ("attention", "math")) in alone and ("latent", ("grouped_matmul", "loop")) in alone
    assert ("mamba", ("attention", "math")) not in alone and ("resnet", ("swiglu", "frugal")) not in alone
    assert ("windowed", ("swiglu", "frugal")) not in alone, "its experts clamp their gates"
    assert ("hybrid", ("attention", "math")) in alone and ("hybrid", ("swiglu", "frugal")) not in alone


def test_one_family_measures_a_kernel_in_several_processes() -> None:
    spread = [case for case in kernel_cases(2, features_here(on_gpu=False)) if case.layout != Layout()]
    assert {case.family for case in spread} == {"dense", "moe", "mamba"}
    assert {case.layout.world_size for case in spread} == {2}
    assert not any(refusals(case) for case in spread)
    heads = [case.layout.tp for case in spread if case.kernel == ("linear_cross_entropy", "full")]
    assert heads and set(heads) == {1}, "it needs the whole vocabulary"


def test_compiled_kernels_are_measured_in_one_process() -> None:
    compiled = [
        case for case in kernel_cases(4, features_here(on_gpu=False)) if case.kernel and case.kernel[1] == "compiled"
    ]
    assert {case.layout for case in compiled} == {Layout()}
    assert {case.family for case in compiled} == {"dense", "mamba"}


def test_a_single_family_measures_all_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in families.FAMILIES if name != "tied"]:
        monkeypatch.delitem(families.FAMILIES, name)
    spread = {case.layout for case in kernel_cases(2, features_here(on_gpu=False))}
    assert Layout(tp=2) in spread and Layout(pp=2) in spread


def test_the_plan_has_the_kernel_and_the_reference_has_not() -> None:
    case = Case("dense", Layout(tp=2), kernel=("attention", "math"))
    assert case.name == "dense-fp32-tp2-attention.math"
    assert build_plan(case, "cpu").kernels.attention == build_spec(case).kernels.attention == "math"
    assert build_plan(case, "cpu").kernels.rope == TORCH
    assert case.reference == Case("dense")


@pytest.mark.clause("KERN-1", "KERN-2")
def test_kernels_are_compared_with_the_reference_of_their_optimizer() -> None:
    (update,) = checks(2, ["dense-fp32-tp2-even_adamw-adamw.foreach"])
    assert [run.case for run in update.runs] == [update.run.case, Case("dense", optimizer="even_adamw")]
    (gradient,) = checks(2, ["dense-fp32-tp2-attention.math-one-step"])
    assert gradient.clause == "KERN-1" and gradient.runs[1].case == Case("dense")
