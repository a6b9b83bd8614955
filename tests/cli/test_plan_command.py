"""`trainspec plan` from the command line to what is printed."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from lab.drawing import slow_after
from rich.console import Console

from trainspec_cli.__main__ import run
from trainspec_cli.core.printable import format_duration
from trainspec_cli.reporter.plan import labels
from trainspec_cli.reporter.plan.json import plan_as_json
from trainspec_cli.reporter.plan.text import render_plan
from trainspec_cli.session.planning.plan import plan_recipe

EIGHT_GPUS = ["recipe=llama3_8b", "cluster.num_nodes=1"]
TOO_SMALL = ["model=llama3_8b", "cluster=a100_40gb", "cluster.num_nodes=1", "cluster.devices_per_node=1"]


PINNED = ["model=llama3_8b", "layout.tp=8", "layout.cp=1", "layout.pp=1", "layout.dp_shard=1", "recompute=none"]
AT_SITES = ["cluster=h100", "cluster.num_nodes=32", "layout.tp=1", "layout.pp=1", "layout.cp=1"]
SCREENS = {
    "tiny": ["recipe=tiny"],
    "infeasible": TOO_SMALL,
    "disturbed": [*EIGHT_GPUS, "layout.tp=1", "layout.pp=1", "disturb=slow_device"],
    "planes": ["recipe=llama3_8b", *AT_SITES, "fabric=mrc_8x100g"],
    "405B": ["recipe=llama3_405b", "cluster=h100", "cluster.num_nodes=2048"],
    "experts": [
        "recipe=mixtral_8x7b",
        "layout.cp=1",
        "layout.pp=1",
        "layout.tp=4",
        "site=norway",
        "cost=owned",
        "framework=megatron",
    ],
    "sites": ["recipe=llama3_8b", *AT_SITES, "resilience=sites", "resilience.sites.link_gbit_s=5"],
    "pools": [*PINNED, "cluster.pools=[h100_sxm*1x8,a100_sxm_80gb*1x8]"],
}
"""Recipes with every part that a plan can have, by name."""


def plan_json(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    assert run(["plan", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_plan_ranks_layouts_and_forecasts_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, *EIGHT_GPUS)
    times = [candidate["expected_step_s"] for candidate in plan["candidates"]]
    assert times[1:] == sorted(times[1:]) and len(times) > 1
    assert times[0] <= 1.1 * min(times), "the simplest of those within 10% comes first"
    assert plan["best"] == plan["candidates"][0] and plan["best"]["fits"]
    assert plan["cluster"]["world_size"] == 8
    run_ = plan["run"]
    assert run_["wall_time_s"] == pytest.approx(run_["steps"] * plan["best"]["step_time_s"] / run_["goodput"])
    assert all(run_[key] > 0 for key in ("energy_joules", "carbon_kg", "cost_usd"))


def test_neither_data_nor_gpus_are_needed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = plan_json(capsys, *EIGHT_GPUS, f"data.path={tmp_path}/not-there", "layout.tp=2")
    assert plan["best"]["layout"]["tp"] == 2


def test_where_and_how_it_is_paid_changes_the_forecast_alone(capsys: pytest.CaptureFixture[str]) -> None:
    world = plan_json(capsys, *EIGHT_GPUS)
    norway = plan_json(capsys, *EIGHT_GPUS, "site=norway", "cost=owned")
    assert norway["best"] == world["best"]
    assert norway["run"]["energy_joules"] == world["run"]["energy_joules"]
    assert norway["run"]["carbon_kg"] / world["run"]["carbon_kg"] == pytest.approx(30.08 / 475)
    assert set(norway["run"]["cost_parts_usd"]) == {"machines", "operation", "electricity"}


def test_what_does_not_fit_exits_3_and_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *TOO_SMALL]) == 3
    printed = capsys.readouterr()
    assert "What would fit" in printed.out
    assert "llama3_8b" in printed.err and "1 A100" in printed.err and "cluster.num_nodes=" in printed.err


def test_what_does_not_fit_is_one_object_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_json(capsys, *TOO_SMALL, code=3)
    assert plan["best"] is None and plan["run"] is None
    assert plan["advice"] and plan["rejected"]


@pytest.mark.slow
def test_the_advice_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    advice = plan_json(capsys, *TOO_SMALL, code=3)["advice"][-1]
    changes = [word for word in advice.split() if "=" in word]
    names = {change.partition("=")[0] for change in changes}
    kept = [argument for argument in TOO_SMALL if argument.partition("=")[0] not in names]
    assert plan_json(capsys, *kept, *changes)["best"]["fits"]


def test_a_sweep_plans_each_value_and_draws_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    sweep = plan_json(capsys, *EIGHT_GPUS, "--sweep", "cluster.num_nodes=1,2", "--html", str(page))
    assert [point["plan"]["cluster"]["world_size"] for point in sweep["points"]] == [8, 16]
    assert "by cluster.num_nodes" in page.read_text()


def test_plans_are_compared_with_changes_and_engines(capsys: pytest.CaptureFixture[str]) -> None:
    changes = "cluster=b200 cluster.num_nodes=2"
    compared = plan_json(capsys, *EIGHT_GPUS, "--compare", changes, "--engine", "trainspec,megatron")
    assert [tuple(point["values"].items()) for point in compared["points"]] == [
        (("changes", which), ("framework", engine))
        for which in ("none", changes)
        for engine in ("trainspec", "megatron")
    ]
    assert [point["plan"]["cluster"]["world_size"] for point in compared["points"]] == [8, 8, 16, 16]
    steps = [point["plan"]["best"]["step_time_s"] for point in compared["points"]]
    assert steps[1] < steps[0] and steps[3] < steps[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--compare", "data.seq_len=4096", "--sweep", "data.seq_len=2048,4096"],
        ["--compare", "framework=megatron", "--engine", "all"],
        ["--compare", "recipe=resnet50"],
    ],
)
def test_plans_that_cannot_stand_side_by_side_are_refused(arguments: list[str]) -> None:
    assert run(["plan", *EIGHT_GPUS, *arguments]) == 2


@pytest.mark.parametrize("changes", ["clustr=b200", "b200", "a='"])
def test_a_mistyped_change_is_refused(changes: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS, "--compare", changes]) == 2
    assert "b200" in capsys.readouterr().err or changes == "a='"


OWN_VALUES = {
    "cluster.reliability.mtbf_device_hours": 40000,
    "cluster.accelerator.price_usd_per_hour": 2,
    "cluster.cost.price_usd_per_device_hour": 2,
    "cluster.site.carbon_g_per_kwh": 50,
    "cluster.site.pue": 1.3,
}


@pytest.mark.parametrize("key", slow_after(2, OWN_VALUES))
def test_a_value_of_the_user_is_exact(key: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def assumed(*arguments: str) -> tuple[float, float, str, bool]:
        found = plan_json(capsys, *EIGHT_GPUS, *arguments)["run"]["assumptions"]
        (one,) = [one for one in found if one["key"] == key]
        return one["value"], one["known_within"], one["source"], one["verified"]

    section, _, name = key.rpartition(".")
    assert assumed(f"{key}={OWN_VALUES[key]}") == (OWN_VALUES[key], 1.0, "recipe", True)
    if "accelerator" not in key:
        about = (f"{section}.known_within.{name}=1.2", f"{section}.sources.{name}=contract")
        assert assumed(f"{key}={OWN_VALUES[key]}", *about) == (OWN_VALUES[key], 1.2, "contract", True)


@pytest.mark.parametrize("flag", ["--trace", "--verbose"])
def test_a_sweep_has_no_details_of_one_plan(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS, flag, "--sweep", "cluster.num_nodes=1,2"]) == 2
    assert f"error: {flag} " in capsys.readouterr().err


@pytest.mark.slow
def test_several_sweeps_are_crossed(capsys: pytest.CaptureFixture[str]) -> None:
    both = ("--sweep", "cluster.num_nodes=1,2", "--sweep", "batching.global_batch_size=64,128")
    sweep = plan_json(capsys, *EIGHT_GPUS, *both)
    assert sweep["key"] == "cluster.num_nodes, batching.global_batch_size"
    points = [(point["value"], point["plan"]["cluster"]["num_nodes"]) for point in sweep["points"]]
    assert points == [("1, 64", 1), ("1, 128", 1), ("2, 64", 2), ("2, 128", 2)]
    assert sweep["points"][1]["values"] == {"cluster.num_nodes": "1", "batching.global_batch_size": "128"}
    assert [point["plan"]["batching"]["global_batch_size"] for point in sweep["points"]] == [64, 128] * 2


@pytest.mark.parametrize("name", slow_after(4, SCREENS))
def test_a_plan_fits_on_one_screen_and_begins_with_the_answer(name: str) -> None:
    plan = plan_recipe(SCREENS[name])
    found: Any = plan_as_json(plan)
    console = Console(file=io.StringIO(), width=100)
    console.print(render_plan(plan, 100))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) <= 40
    answer = "\n".join(lines[:5])
    best, run_ = found["best"], found["run"]
    if name == "infeasible":
        peak = labels.gib(found["candidates"][0]["peak_memory_bytes"])
        assert [figure for figure in (peak, found["advice"][0][:60]) if figure not in answer] == [] and best is None
        return
    intervals = run_["intervals"]
    times = [run_["wall_time_s"], *intervals["wall_time_s"], best["step_time_s"], 1.45 * best["step_time_s"]]
    shown = [f"{axis} {best['layout'][axis]}" for axis in ("tp", "pp", "cp", "ep") if best["layout"][axis] > 1]
    shown += [
        labels.percent(best["mfu"], 1),
        labels.percent(best["mfu"] / 1.45, 1),
        labels.gib(best["peak_memory_bytes"]),
    ]
    shown += map(format_duration, times)
    dollars = [run_["cost_usd"], *intervals["cost_usd"]] if run_["cost_usd"] else []
    shown += map(labels.format_money, dollars)
    assert [figure for figure in shown if figure not in answer] == []


def test_all_of_a_plan_is_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS]) == 0
    brief = capsys.readouterr().out
    assert run(["plan", *EIGHT_GPUS, "--verbose"]) == 0
    whole = capsys.readouterr().out
    plan = plan_json(capsys, *EIGHT_GPUS)
    keys = [assumption["key"] for assumption in plan["run"]["assumptions"]]
    parts = [*keys, *plan["assumptions"], *plan["rejected"], *("fragmentation", "reduce-scatter")]
    assert whole.splitlines()[:5] == brief.splitlines()[:5]
    assert [part for part in parts if part not in " ".join(whole.split())] == []
    assert not any(key in brief for key in keys)


def test_into_a_pipe_no_line_is_filled_with_spaces(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 10
    assert [line for line in lines if line != line.rstrip()] == []


def test_one_page_for_one_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert run(["plan", *EIGHT_GPUS, "--html", str(page)]) == 0
    assert "llama3_8b on 8 H100" in page.read_text()


@pytest.mark.parametrize("sweep", ["cluster.num_nodes", "cluster.num_nodes=", "=1,2"])
def test_a_sweep_without_key_or_values_is_refused(sweep: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS, "--sweep", sweep]) == 2
    assert "--sweep cluster.num_nodes=1,2,4,8" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["plan", *EIGHT_GPUS, "--html", str(tmp_path / "no" / "plan.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_wrong_values_are_told_with_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", *EIGHT_GPUS, "cluster.site.pue=0.8", "cluster.reliability.detct_s=5"]) == 2
    said = capsys.readouterr().err
    assert "cluster.site.pue" in said and "`cluster.reliability.detect_s`" in said
