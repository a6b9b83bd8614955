"""Which of the layouts that predictions do not tell apart is chosen, and that every command chooses from one set."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import NEAR, pin_layout, plan_best, plan_capacity
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.search.search import ABOUT, complexity
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.planner.validation.backtest import SWEEP_KEYS, backtest
from trainspec_cli.planner.validation.table import frameworks
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import Machine
from trainspec_cli.recipe.keys.run import RunSpec
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.recipe.rules.check import check
from trainspec_cli.recipe.rules.comm import whole_hosts
from trainspec_cli.recipe.rules.engine import check_engine
from trainspec_cli.session.planning.plan import plan_loaded, plan_recipe
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.interop import layout_of
from trainspec_cli.wings.interop.emit import resolved

TABLE = Path(__file__).parents[2] / "data" / "measured" / "throughput.csv"
RECIPES = [name for name in find_folders(Path.cwd()).recipe_names() if name != "plan_defaults"]


@cache
def planned(*arguments: str) -> tuple[RunSpec, CapacityPlan]:
    spec = load_for_planning(arguments).spec
    return spec, plan_capacity(spec)


def on_h100(recipe: str, nodes: int, *more: str) -> tuple[RunSpec, CapacityPlan]:
    return planned(f"recipe={recipe}", "cluster=h100", f"cluster.num_nodes={nodes}", "layout=auto", *more)


def with_h100s(gpus: int) -> Machine:
    names = ("NVIDIA H100 80GB HBM3",) * gpus
    return Machine("node", 64, 2**40, gpu_names=names, gpu_memory_bytes=80 * 2**30, bf16=True)


def weight(spec: RunSpec, candidate: Candidate) -> tuple[int, bool]:
    return complexity(spec, candidate.layout, candidate.recompute, candidate.offload == "optimizer")


@pytest.mark.parametrize(
    ("recipe", "nodes"),
    [("llama3_8b", 1), ("llama3_70b", 32), ("llama3_405b", 128), ("qwen3_14b", 4), ("gpt_oss_20b", 2)],
)
def test_no_layout_that_is_about_as_fast_is_simpler_than_the_chosen_one(recipe: str, nodes: int) -> None:
    spec, found = on_h100(recipe, nodes)
    best, fastest = found.best, found.fastest
    assert best is not None and fastest is not None
    assert best.expected_step_s <= ABOUT * fastest.expected_step_s
    alike = [one for one in found.candidates if one.expected_step_s <= ABOUT * fastest.expected_step_s]
    assert weight(spec, best) == min(weight(spec, one) for one in alike)
    as_simple = [one for one in alike if weight(spec, one) == weight(spec, best)]
    sure = [one for one in as_simple if one.fit_probability >= best.fit_probability]
    near = [one for one in sure if one.expected_step_s <= NEAR * min(each.expected_step_s for each in as_simple)]
    assert best.layout.pp == min(one.layout.pp for one in near)


def test_a_large_model_has_no_more_stages_than_an_expert_would_give_it() -> None:
    """405B on 1,024 H100: the fastest by prediction is tp 4, cp 4, pp 64; experts start from tp 8, pp 16."""
    _, found = on_h100("llama3_405b", 128)
    assert found.best is not None and found.usual is not None
    assert (found.best.layout.tp, found.best.layout.pp) == (8, 16)
    assert found.usual.layout.tp == 8 and found.usual.layout.cp == 1 and found.usual.layout.pp <= 16
    assert found.usual.step_time_s > found.best.step_time_s


@pytest.mark.parametrize("gpus", [1, 2, 4, 6, 8])
def test_a_small_model_is_data_parallel_on_detected_gpus(gpus: int) -> None:
    """The quickstart: 6.4M parameters, 16 samples a step."""
    layout = plan(load_for_planning(["recipe=quickstart"]).spec, with_h100s(gpus)).layout
    assert layout.data_parallel_size == layout.world_size == gpus


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_first_layout_of_every_recipe_is_one_that_validate_accepts(recipe: str) -> None:
    """Every axis open, on the cluster that the recipe names, or one node of H100: what is planned can be launched."""
    arguments = [f"recipe={recipe}", "layout=auto", *(["model=llama3_8b"] if recipe == "finetune_chat" else [])]
    spec = load_for_planning(arguments).spec
    if spec.cluster.accelerator is None:
        spec = load_for_planning([*arguments, "cluster=h100"]).spec
    first = plan_best(spec)
    assert first is not None
    before = [*check(spec), *check_engine(spec)]
    pinned = pin_layout(spec, first.layout)
    assert [problem for problem in (*check(pinned), *check_engine(pinned)) if problem not in before] == []


def test_predictions_rank_layouts_of_one_run_no_more_finely_than_a_tenth() -> None:
    """Of published runs that differ in the layout alone. The table has two sources of such sweeps."""
    with TABLE.open() as file:
        tested = backtest(csv.DictReader(file), Efficiency())
    sweeps = defaultdict(list)
    for one in tested.predictions:
        if one.judged and one.step_time_s and one.measured_step_time_s:
            sweeps[tuple(one.row.get(key) for key in SWEEP_KEYS)].append(one)
    squares: list[float] = []
    for runs in sweeps.values():
        errors = [math.log(1 + (one.step_error or 0.0)) for one in runs]
        layouts = {(replace(one.setup, fabric=None), one.row.get("mbs")) for one in runs if one.setup}  # type: ignore[arg-type]
        if len(layouts) > 1:
            middle = mean(errors)
            squares += [(error - middle) ** 2 * len(errors) / (len(errors) - 1) for error in errors]
    assert len(squares) > 40
    assert 0.03 < math.sqrt(mean(squares)) < ABOUT - 1 + 0.02


@pytest.mark.parametrize(
    ("groups", "inside"), [(2, AUTO), (4, AUTO), (8, AUTO), (4, 2), (AUTO, AUTO), (AUTO, 4)], ids=str
)
def test_a_plan_of_replica_groups_has_as_many_as_the_recipe_asks_for(groups: int | str, inside: int | str) -> None:
    """And the launch on the same GPUs, the candidates' tests of `disturb=`, and the layout that `emit` writes."""
    asked = [f"resilience.replica_groups={groups}", f"layout.dp_replicate={inside}"]
    cluster = ["cluster=h100", "cluster.num_nodes=4"]
    loaded = load_for_planning(["recipe=llama3_8b", *cluster, "resilience=elastic", *asked])
    spec = loaded.spec
    report = plan_loaded(loaded)
    found = report.capacity
    assert found.candidates
    for candidate in found.candidates:
        layout, number = one_group(spec, candidate.layout)
        assert layout.world_size * number == 32 and number >= 2
        assert groups in (AUTO, number)
        if groups != AUTO:
            assert inside in (AUTO, layout.dp_replicate)
        else:
            assert inside in (AUTO, number) and layout.dp_replicate == 1
        assert list(whole_hosts(4, number)) == []
    assert found.best is not None
    assert layout_of(resolved(report)) == found.best.layout
    launched = plan(replace(spec, cluster=replace(spec.cluster, accelerator=None)), with_h100s(8))
    chosen, number = one_group(spec, found.best.layout)
    assert (launched.layout.describe(), launched.replica_groups) == (chosen.describe(), number)


def test_replica_groups_on_detected_gpus_are_launched() -> None:
    """The quickstart in 4 groups on 8 GPUs ended in a division by zero."""
    arguments = ["recipe=quickstart", "resilience=elastic", "resilience.replica_groups=4"]
    planned = plan(load_for_planning(arguments).spec, with_h100s(8))
    assert planned.replica_groups == 4 and planned.layout.world_size == 2


@pytest.mark.parametrize("disturb", ["node_leaves", "slow_node", "slow_device"])
def test_replica_groups_are_simulated_under_a_disturbance(disturb: str) -> None:
    arguments = ["recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=8", "resilience=elastic"]
    report = plan_recipe([*arguments, "resilience.replica_groups=8", f"disturb={disturb}"])
    assert report.simulation is not None and report.simulation.replica_groups == 8


def test_a_pinned_layout_that_the_engine_refuses_is_an_error_of_the_recipe() -> None:
    """Other frameworks have other rules, and are planned for."""
    spec = load_for_planning(["recipe=llama3_8b", "cluster=h100", "cluster.num_nodes=1"]).spec
    refused = replace(spec, layout=replace(spec.layout, cp=1, tp=1, pp=4, virtual_stages=2, pipeline_schedule="1f1b"))
    with pytest.raises(RecipeError) as raised:
        plan_capacity(refused)
    assert [problem.path for problem in raised.value.problems] == ["layout.virtual_stages"]
    assert plan_capacity(replace(refused, framework=frameworks()["megatron"])).candidates
