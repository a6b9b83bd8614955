"""What results say of themselves: sums, sizes, and their JSON."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.recipe.keys.layout import Layout
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec
from trainspec_cli.recipe.results.doctor import Check, Diagnosis, NodeReport
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan, LocalPrediction, MemoryBreakdown, Plan, StepTime
from trainspec_cli.recipe.results.tools import Curve, MachineProbe, MatmulCurves, Passes, Reference, SpeedResult

SPEC = RunSpec(
    model=DecoderModel(2, 64, 4, 2, 16, 160, 512),
    data=DataSpec(seq_len=1024, source="python_stdlib"),
    optim=OptimSpec(lr=0.1),
    batching=BatchingSpec(global_batch_size=48),
    train=TrainSection(max_steps=10),
)
PLAN = Plan(SPEC, Layout(dp_replicate=2, tp=2), "cpu", 4, 8, "bf16", 2, 3, "none", "none", 1000, 6000.0)


@pytest.mark.parametrize("kind", [MemoryBreakdown, StepTime])
def test_parts_sum_to_the_whole(kind: type[MemoryBreakdown] | type[StepTime]) -> None:
    names = [field.name for field in fields(kind)]
    parts = kind(**{name: 2.0**power for power, name in enumerate(names)})
    total = parts.total_bytes if isinstance(parts, MemoryBreakdown) else parts.total_s
    assert total == 2.0 ** len(names) - 1
    empty = kind()
    assert all(getattr(empty, name) == 0 for name in names)


def candidate(peak_bytes: float) -> Candidate:
    rates = {"tokens_per_s": 1.0, "tokens_per_s_per_gpu": 1.0, "mfu": 0.5, "hfu": 0.5}
    return Candidate(
        *(Layout(), 1, 1, "none", "none", 1.0),
        **rates,
        peak_memory_bytes=peak_bytes,
        memory_limit_bytes=100.0,
        fit_probability=1.0,
        expected_step_s=1.0,
        memory=(),
        time=StepTime(),
    )


def test_the_best_candidate_is_the_first_if_it_fits() -> None:
    assert candidate(100.0).fits and not candidate(100.1).fits
    plan = CapacityPlan(1, 1, 6.0, 8, 10, (candidate(90.0), candidate(80.0)))
    assert plan.best is plan.candidates[0]
    assert replace(plan, candidates=(candidate(101.0), candidate(80.0))).best is None
    assert replace(plan, candidates=()).best is None
    assert (plan.rejected, plan.advice, plan.assumptions, plan.considered) == ({}, (), (), 0)


def test_sizes_of_a_plan() -> None:
    assert (PLAN.world_size, PLAN.group_size, PLAN.tokens_per_step) == (32, 32, 48 * 1024)
    assert (PLAN.replica_groups, PLAN.peak_flops, PLAN.peak_source, PLAN.prediction) == (1, None, "", None)
    assert PLAN.as_one_group == PLAN


def test_a_run_makes_the_steps_of_its_recipe_unless_its_batch_changes() -> None:
    assert PLAN.total_steps == 10
    assert replace(PLAN, steps=7).total_steps == 7


@pytest.mark.parametrize(
    ("groups", "nodes"),
    [
        (1, [range(4)]),
        (2, [range(2), range(2, 4)]),
        (4, [range(1), range(1, 2), range(2, 3), range(3, 4)]),
        (8, [range(1), range(1), range(1, 2), range(1, 2), range(2, 3), range(2, 3), range(3, 4), range(3, 4)]),
    ],
)
def test_nodes_of_replica_groups(groups: int, nodes: list[range]) -> None:
    plan = replace(PLAN, replica_groups=groups)
    assert [plan.nodes_of_group(group) for group in range(groups)] == nodes
    assert plan.group_size == 32 // groups
    assert plan.as_one_group == replace(PLAN, layout=replace(PLAN.layout, dp_replicate=2 * groups))


def test_a_prediction_needs_what_lies_beside_the_allocator_too() -> None:
    found = LocalPrediction({"forward": 1.0, "backward": 2.5}, {"parameters": 10.0, "loss": 5.0}, {"context": 7.0})
    assert (found.step_time_s, found.peak_memory_bytes, found.needed_bytes) == (3.5, 15, 22)
    assert LocalPrediction({}, {"x": 3.0}).needed_bytes == 3


def test_a_probe_that_was_displaced_for_more_than_a_tenth_is_disturbed() -> None:
    curve = Curve((1.0, 2.0), (1.0, 2.0))
    small, large = Reference(PLAN, {}, 1.0), Reference(PLAN, {}, 2.0)
    passes = (Passes(curve, curve),) * 5
    products = MatmulCurves(curve, curve, curve)
    figures = {"bare_bytes": 1, "displaced": 0.1, "peak_flops": 1.0}
    probe = MachineProbe(2, "bf16", {}, {}, small, large, products, *passes, *(curve,) * 7, **figures)
    assert not probe.is_disturbed and replace(probe, displaced=0.11).is_disturbed
    assert probe.references == (small, large)


SPEED = SpeedResult("2.13", None, None, 2, 1e12, 1e11, 1)


def test_the_doctors_reports_as_json() -> None:
    check = {"name": "disk", "status": "warn", "found": "1 GB", "advice": "make room"}
    node = NodeReport("a", 5.0, (Check(**check),))  # type: ignore[arg-type]
    assert node.as_json() == {"host": "a", "time": 5.0, "checks": [check], "speed": {}}
    heard = replace(node, speed=SPEED, heard_at=6.0).as_json()
    assert (heard["heard_at"], heard["speed"]["matmul_flops"]) == (6.0, 1e12)
    diagnosis = Diagnosis("warn", (node,), (Check("links", "ok", "fast"),), "a", None)
    found = diagnosis.as_json()
    assert found["hosts"] == [node.as_json()]
    assert found["between"] == [{"name": "links", "status": "ok", "found": "fast", "advice": ""}]
    assert (found["status"], found["slowest"], found["links"]) == ("warn", "a", None)


# A probe's curves: straight on logarithmic axes between its points, and in proportion beyond the last.


CURVE = Curve((1.0, 100.0, 10_000.0), (1e-3, 4e-3, 1.0))


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (0.0, 1e-3),
        (1.0, 1e-3),
        (10.0, 2e-3),  # half the way to 100 on a logarithmic axis is half the way from 1 to 4 ms on the other
        (100.0, 4e-3),
        (1000.0, (4e-3 * 1.0) ** 0.5),
        (10_000.0, 1.0),
        (25_000.0, 2.5),
    ],
)
def test_a_curve_between_and_beyond_its_points(size: float, seconds: float) -> None:
    assert CURVE.at(size) == pytest.approx(seconds, rel=1e-12)


def test_what_a_size_costs_beyond_the_call() -> None:
    assert CURVE.beyond_call(10.0) == pytest.approx(1e-3)
    assert CURVE.beyond_call(1.0) == 0.0
    falling = Curve((1.0, 100.0), (4e-3, 1e-3))
    assert falling.beyond_call(100.0) == 0.0, "a call that was measured as slower than the work"


@given(st.floats(0.5, 1e6), st.floats(1.0, 10.0))
def test_a_rising_curve_never_falls(size: float, factor: float) -> None:
    assert CURVE.at(size * factor) >= CURVE.at(size) * (1 - 1e-12)
