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


def test_every_operation_of_a_recipe_has_torchs_default_first() -> None:
    assert [field.name for field in fields(KernelSpec)] == list(KERNELS)
    assert all(next(iter(backends)) == TORCH for backends in KERNELS.values())
    assert all(BACKENDS[f"{op} {TORCH}"] == Backend(BACKENDS[f"{op} {TORCH}"].source) for op in KERNELS)
    assert set(IN_BLOCKS) == set(KERNELS) - {"linear_cross_entropy", "adamw"}


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
    assert table.resolve(wanted) == replace(wanted, attention=chosen)
    assert table.resolve(KernelSpec(attention="math")) == KernelSpec(attention="math")
