"""The plan as JSON: the names that programs rely on."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.recipe.results.forecast import BatchForecast
from trainspec_cli.reporter.plan.json import plan_as_json, sweep_as_json
from trainspec_cli.reporter.plan.labels import PlanReport, SweepReport


@pytest.fixture
def plain(plan: PlanReport) -> Any:
    return plan_as_json(plan)


def test_the_schema_has_the_promised_names(plain: Any) -> None:
    assert plain["schema"] == "trainspec.plan/1"
    assert {"schema", "model", "cluster", "best", "candidates", "rejected", "run"} <= plain.keys()
    assert {"params", "active_params", "flops_per_token"} <= plain["model"].keys()
    promised = {
        "layout",
        "step_time_s",
        "tokens_per_s",
        "tokens_per_s_per_gpu",
        "mfu",
        "peak_memory_bytes",
        "memory",
        "time",
        "fits",
    }
    assert all(promised <= candidate.keys() for candidate in plain["candidates"])
    promised = {"tokens", "wall_time_s", "goodput", "energy_joules", "carbon_kg", "cost_usd", "assumptions"}
    assert promised <= plain["run"].keys()


def test_the_steps_of_each_size_have_promised_names(plan: PlanReport) -> None:
    assert plan.run is not None
    run = replace(plan.run, batches=(BatchForecast(128, 500, 4.0), BatchForecast(256, 250, 7.5)))
    found: Any = plan_as_json(replace(plan, run=run))
    assert found["run"]["batches"] == [
        {"step_samples": 128, "steps": 500, "step_time_s": 4.0},
        {"step_samples": 256, "steps": 250, "step_time_s": 7.5},
    ]


def test_it_survives_being_written_and_read(plain: Any) -> None:
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain


def test_memory_is_that_of_the_fullest_stage_and_sums_to_the_peak(plain: Any) -> None:
    best = plain["best"]
    assert sum(best["memory"].values()) == best["peak_memory_bytes"]
    assert [sum(stage.values()) for stage in best["memory_by_stage"]] == [40 * 2**30, 20 * 2**30]


def test_phases_sum_to_the_step(plain: Any) -> None:
    assert sum(plain["best"]["time"].values()) == pytest.approx(plain["best"]["step_time_s"])


def test_figures_of_the_run_are_plain_numbers_with_bounds_beside_them(plain: Any) -> None:
    run = plain["run"]
    assert run["goodput"] == 0.9
    assert run["intervals"]["goodput"] == [0.85, 0.95]
    assert run["cost_usd"] is None and run["intervals"]["cost_usd"] is None


def test_refusals_come_most_frequent_first(plain: Any) -> None:
    assert list(plain["rejected"].values()) == [400, 40]


def test_what_a_layout_does_not_have_is_not_told(plain: Any) -> None:
    piped, sharded = (candidate["layout"] for candidate in plain["candidates"])
    assert piped["pipeline_schedule"] == "1f1b" and "sequence_parallel" in piped
    assert "pipeline_schedule" not in sharded and "sequence_parallel" not in sharded


def test_without_a_layout_that_fits_there_is_no_best_and_no_run(infeasible: PlanReport) -> None:
    plain: Any = plan_as_json(infeasible)
    assert plain["best"] is None and plain["run"] is None
    assert plain["candidates"][0]["fits"] is False
    assert plain["advice"] == ["recompute=full", "4 nodes"]


def test_a_sweep_holds_one_plan_a_value(sweep: SweepReport) -> None:
    plain: Any = sweep_as_json(sweep)
    assert (plain["schema"], plain["key"]) == ("trainspec.plan-sweep/1", "cluster.num_nodes")
    assert plain["points"][1]["values"] == {"cluster.num_nodes": "2"}
    assert [(point["value"], point["plan"]["cluster"]["world_size"]) for point in plain["points"]] == [
        ("1", 16),
        ("2", 16),
        ("4", 32),
    ]


def test_an_interval_without_a_best_is_null(plan: PlanReport, plain: Any) -> None:
    """Where no failure is expected, no checkpoint is due."""
    assert plan.run is not None
    endless = replace(plan.run, goodput=replace(plan.run.goodput, optimal_interval_s=math.inf))
    found: Any = plan_as_json(replace(plan, run=endless))
    assert found["run"]["recovery"]["optimal_interval_s"] is None
    assert plain["run"]["recovery"]["optimal_interval_s"] == 390.0
