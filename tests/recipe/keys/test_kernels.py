"""The table of kernels: where each may be used, and what a comparison settles."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from trainspec_cli.recipe.keys.kernels import (
    IN_BLOCKS,
    KERNELS,
    TORCH,
    Backend,
    KernelFigure,
    KernelSpec,
    KernelTable,
)

BACKENDS = {f"{op} {name}": backend for op, backends in KERNELS.items() for name, backend in backends.items()}


def those_with(**wanted: object) -> set[str]:
    found = (name for name, each in BACKENDS.items() if all(getattr(each, key) == wanted[key] for key in wanted))
    return set(found)


def test_every_operation_of_a_recipe_has_torchs_default_first() -> None:
    assert [field.name for field in fields(KernelSpec)] == list(KERNELS)
    assert all(next(iter(backends)) == TORCH for backends in KERNELS.values())
    assert all(BACKENDS[f"{op} {TORCH}"] == Backend(BACKENDS[f"{op} {TORCH}"].source) for op in KERNELS)
    assert set(IN_BLOCKS) == set(KERNELS) - {"linear_cross_entropy", "adamw"}


def test_backends_that_need_something() -> None:
    liger = {f"{op} liger" for op in ("rms_norm", "swiglu", "rope", "linear_cross_entropy")}
    attention = {f"attention {name}" for name in ("efficient", "cudnn", "flex")}
    assert those_with(on="cuda") == liger | attention | {"ssd_scan fla"}
    assert those_with(package="liger_kernel", extra="kernels") == liger
    assert those_with(package="fla", extra="kernels") == {"ssd_scan fla"}
    assert those_with(package="torchao", extra="float8") == {"adamw torchao"}
    assert len(those_with(package="")) == len(BACKENDS) - 6
    assert those_with(since_torch=(2, 13)) == {"linear_cross_entropy native"}
    assert len(those_with(since_torch=(2, 11))) == len(BACKENDS) - 1


def test_backends_that_auto_or_a_compiler_or_a_cut_vocabulary_rule_out() -> None:
    assert those_with(more_memory=True) == {
        *("attention expanded", "attention math", "linear_cross_entropy chunks_512mib", "linear_cross_entropy full"),
        *("ssd_scan block_256", "adamw foreach"),
    }
    assert those_with(whole_vocabulary=True) == {f"linear_cross_entropy {name}" for name in ("native", "full", "liger")}
    assert those_with(fused=True) == {f"{op} compiled" for op in ("rms_norm", "swiglu", "rope", "ssd_scan")}
    assert those_with(compiles=True) == {"attention flex", "adamw torchao"}
    assert those_with(needs_compiler=True) == those_with(fused=True) | those_with(compiles=True)


def test_options_of_one_function() -> None:
    assert {name: backend.options for name, backend in BACKENDS.items() if backend.options} == {
        "linear_cross_entropy chunks_16mib": {"chunk_bytes": 16 * 2**20},
        "linear_cross_entropy chunks_512mib": {"chunk_bytes": 512 * 2**20},
        "ssd_scan block_32": {"block": 32},
        "ssd_scan block_64": {"block": 64},
        "ssd_scan block_256": {"block": 256},
    }


def test_a_package_is_missing_where_it_is_not_installed() -> None:
    assert Backend("x:y", package="pytest").missing_package() == ""
    assert Backend("x:y", package="no_such_package_here").missing_package() == "no_such_package_here"
    assert Backend("x:y").missing_package() == ""


def test_operations_that_are_open_and_those_that_are_changed() -> None:
    spec = KernelSpec(attention="auto", rope="halves", adamw="auto")
    assert spec.open_ops == ("attention", "adamw")
    assert spec.changed == {"rope": "halves"}
    assert spec.by_op == dict.fromkeys(KERNELS, TORCH) | {"attention": "auto", "rope": "halves", "adamw": "auto"}
    assert (KernelSpec().open_ops, KernelSpec().changed) == ((), {})


@pytest.mark.parametrize(
    ("verdicts", "chosen"),
    [
        ({TORCH: "default", "flash": "chosen"}, "flash"),
        ({TORCH: "default", "math": "not faster", "flash": "chosen"}, "flash"),
        ({TORCH: "default", "math": "wrong", "flash": "failed"}, TORCH),
        ({}, TORCH),
    ],
)
def test_a_table_settles_what_is_open(verdicts: dict[str, str], chosen: str) -> None:
    figures = {"attention": {name: KernelFigure(verdict) for name, verdict in verdicts.items()}}  # type: ignore[arg-type]
    table = KernelTable("cpu", "bf16", "2.13", figures=figures)
    assert table.chosen("attention") == chosen
    assert table.chosen("rope") == TORCH
    wanted = KernelSpec(attention="auto", rope="halves")
    assert table.settle(wanted) == replace(wanted, attention=chosen)
    assert table.settle(KernelSpec(attention="math")) == KernelSpec(attention="math")
