"""The measured kernels are cached, for what they were measured for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainspec_cli.launch import kernels
from trainspec_cli.rundir.files import read_json, write_json
from trainspec_cli.spec.canonical import from_plain, to_plain
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.kernels import TORCH, KernelSpec, KernelTable, KernelTrial, KernelTrials
from trainspec_cli.spec.results.plan import Plan

TRIALS = KernelTrials(
    {"rope": ("2 x (2, 8, 4, 16)",)},
    {"rope": {TORCH: KernelTrial((1.0, 1.0), 1e-3, 8e-3), "halves": KernelTrial((0.5, 0.6), 1e-3, 8e-3)}},
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """Plans that were measured; processes leave made-up figures."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    plans: list[Plan] = []

    def leave_figures(job: Any, figures: Sequence[Path], hint: str) -> None:
        plans.append(from_plain(Plan, read_json(job.root / "plan.json")))
        for path in figures:
            write_json(path, to_plain(TRIALS))

    monkeypatch.setattr(kernels, "run_probe", leave_figures)
    return plans


def measure(plan: Plan, machine: Machine, **options: bool) -> KernelTable:
    return kernels.measure_kernels(plan, machine, lambda: None, **options)


def test_it_is_measured_once(measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine) -> None:
    first = measure(make_plan(), machine)
    assert measure(make_plan(), machine) == first
    assert len(measured) == 1
    assert first.chosen("rope") == "halves"
    assert first.settle(KernelSpec(rope="auto", swiglu="auto", adamw="for_loop")) == KernelSpec(
        rope="halves", adamw="for_loop"
    )
    measure(make_plan(), machine, again=True)
    assert len(measured) == 2


def test_another_chip_torch_library_or_shape_is_measured_anew(
    measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan()
    measure(plan, machine)
    others = [
        (plan, replace(machine, gpu_names=("NVIDIA H200",))),
        (replace(plan, micro_batch_size=1), machine),
        (replace(plan, compute="bf16"), machine),
        (replace(plan, spec=replace(plan.spec, compile=True)), machine),
        (replace(plan, spec=replace(plan.spec, data=replace(plan.spec.data, seq_len=16))), machine),
        (replace(plan, spec=replace(plan.spec, model=replace(plan.spec.model, ffn_size=96))), machine),
    ]
    for number, (other, where) in enumerate(others, start=2):
        measure(other, where)
        assert len(measured) == number
    monkeypatch.setattr("trainspec_cli.launch.probing.version", lambda _name: "9.9")
    measure(plan, machine)
    assert len(measured) == len(others) + 2
    monkeypatch.setattr(kernels, "library_versions", lambda: {"liger-kernel": "0.9"})
    measure(plan, machine)
    assert len(measured) == len(others) + 3


def test_what_changes_no_shape_is_not_measured_again(
    measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine
) -> None:
    plan = make_plan()
    measure(plan, machine)
    longer = replace(plan.spec, train=replace(plan.spec.train, max_steps=999, seed=5))
    measure(replace(plan, spec=longer), machine)
    assert len(measured) == 1


def test_a_table_of_another_version_is_measured_again(
    measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine
) -> None:
    write_json(kernels.table_path(make_plan(), machine), {"something": "else"})
    assert measure(make_plan(), machine).chosen("rope") == "halves"
    assert len(measured) == 1


def test_of_several_hosts_one_measures(
    measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own processes, at the shapes of the whole run."""
    plan = make_plan()
    wide = replace(plan, num_nodes=4, layout=replace(plan.layout, dp_replicate=8))
    measure(wide, machine)
    assert measured == [wide]
