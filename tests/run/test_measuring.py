"""Measurements are cached with their conditions: kernels permanently, a disturbed probe for a while."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.kernels import TORCH, KernelSpec, KernelTable, KernelTrial, KernelTrials
from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.recipe.results.tools import BUSY, KernelRequest, KernelResult, MachineProbe, TraceRequest
from trainspec_cli.run import tools as measuring
from trainspec_cli.run.folder.files import write_json
from trainspec_cli.run.tools import Prepare

MACHINE = Machine("host", cpu_cores=2, memory_bytes=2**34, bf16=True)
TRIALS = KernelTrials(
    {"rope": ("2 x (2, 8, 4, 16)",)},
    {"rope": {TORCH: KernelTrial((1.0, 1.0), 1e-3, 8e-3), "halves": KernelTrial((0.5, 0.6), 1e-3, 8e-3)}},
)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Plan]:
    """Plans that were measured; the tool answers with made-up figures."""
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    plans: list[Plan] = []

    def answer(tool: object, request: KernelRequest, prepare: Prepare) -> KernelResult:
        job, _ = prepare(tmp_path / "job", ())
        plans.append(request.plan)
        return KernelResult((TRIALS,) * job.world_size)

    monkeypatch.setattr(measuring, "run_tool", answer)
    return plans


def measure(plan: Plan, machine: Machine, **options: bool) -> KernelTable:
    return measuring.measure_kernels(plan, machine, lambda: None, **options)


def test_it_is_measured_once(measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine) -> None:
    first = measure(make_plan(), machine)
    assert measure(make_plan(), machine) == first
    assert len(measured) == 1
    assert first.chosen("rope") == "halves"
    assert first.resolve(KernelSpec(rope="auto", swiglu="auto", adamw="for_loop")) == KernelSpec(
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
    monkeypatch.setattr(measuring.metadata, "version", lambda _name: "9.9")
    measure(plan, machine)
    assert len(measured) == len(others) + 2
    monkeypatch.setattr(measuring, "LIBRARIES", measuring.LIBRARIES[:1])
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
    write_json(measuring.table_path(make_plan(), machine), {"something": "else"})
    assert measure(make_plan(), machine).chosen("rope") == "halves"
    assert len(measured) == 1


def test_of_several_nodes_one_measures(
    measured: list[Plan], make_plan: Callable[..., Plan], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own processes, at the shapes of the whole run."""
    plan = make_plan()
    wide = replace(plan, num_nodes=4, layout=replace(plan.layout, dp_replicate=8))
    measure(wide, machine)
    assert measured == [wide]


@pytest.mark.parametrize(
    ("displaced", "age_s", "probes"),
    [
        (BUSY / 2, 2 * measuring.DISTURBED_HOLDS_S, 1),
        (2 * BUSY, measuring.DISTURBED_HOLDS_S / 2, 1),
        (2 * BUSY, 2 * measuring.DISTURBED_HOLDS_S, 2),
    ],
)
def test_a_disturbed_probe_is_used_for_a_while(
    displaced: float,
    age_s: float,
    probes: int,
    made_up_probe: MachineProbe,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("TRAINSPEC_CACHE", str(tmp_path))
    probe, plan = replace(made_up_probe, displaced=displaced), made_up_probe.large.plan
    started: list[int] = []
    monkeypatch.setattr(measuring, "run_tool", lambda *_: probe)
    for _ in range(2):
        assert measuring.probe_machine(plan, MACHINE, lambda: started.append(1)) == probe
        then = time.time() - age_s
        os.utime(measuring.probe_path(plan, MACHINE), (then, then))
    assert len(started) == probes


@pytest.mark.parametrize(
    ("layout", "world_size", "ranks"),
    [
        (Layout(dp_replicate=2), 2, [0]),
        (Layout(pp=2, tp=2), 4, [0, 2]),
        (Layout(pp=4, dp_shard=2), 8, [0, 6]),
        (Layout(pp=2, cp=2, tp=2), 8, [2, 6]),
        (Layout(cp=4, dp_shard=2), 8, [3]),
    ],
)
def test_the_first_and_the_last_stage_are_traced(
    make_plan: Callable[..., Plan], layout: Layout, world_size: int, ranks: list[int]
) -> None:
    plan = replace(make_plan(), layout=layout, devices_per_node=world_size)
    assert plan.world_size == world_size
    assert measuring.traced_ranks(plan) == ranks


def test_the_fullest_of_the_traced_ranks_counts(
    make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def answer(tool: object, request: TraceRequest, where: object) -> SimpleNamespace:
        assert tool is measuring.TRACE
        asked.append(request.rank)
        return SimpleNamespace(rank=request.rank, peak_memory_bytes={0: 7, 6: 9}[request.rank])

    monkeypatch.setattr(measuring, "run_tool", answer)
    plan = replace(make_plan(), layout=Layout(pp=4, dp_shard=2), devices_per_node=8)
    assert (measuring.trace_plan(plan).rank, asked) == (6, [0, 6])
