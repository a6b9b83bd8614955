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

from trainspec_cli.composer.folders import find_folders
from trainspec_cli.planner.capacity import NEAR, plan_best, plan_capacity
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.search.auto import pin_layout
from trainspec_cli.planner.search.search import ABOUT, complexity
from trainspec_cli.planner.validation.backtest import SWEEP_KEYS, backtest
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.spec.recipe.cluster import Machine
from trainspec_cli.spec.recipe.run import RunSpec
from trainspec_cli.spec.results.prediction import Candidate, CapacityPlan
from trainspec_cli.spec.rules.check import check
from trainspec_cli.spec.rules.engine import check_engine

TABLE = Path(__file__).parents[2] / "data" / "measured" / "throughput.csv"
RECIPES = [name for name in find_folders(Path.cwd()).recipe_names() if name != "plan_defaults"]


@cache
def planned(*arguments: str) -> tuple[RunSpec, CapacityPlan]:
    spec = load_for_planning(arguments).spec
    return spec, plan_capacity(spec)


def on_h100(recipe: str, nodes: int, *more: str) -> tuple[RunSpec, CapacityPlan]:
    return planned(f"recipe={recipe}", "cluster=h100", f"cluster.num_nodes={nodes}", "layout=auto", *more)


def weight(candidate: Candidate) -> tuple[int, bool]:
    return complexity(candidate.layout, candidate.recompute, candidate.offload == "optimizer")


@pytest.mark.parametrize(
    ("recipe", "nodes"),
    [("llama3_8b", 1), ("llama3_70b", 32), ("llama3_405b", 128), ("qwen3_14b", 4), ("gpt_oss_20b", 2)],
)
def test_no_layout_that_is_about_as_fast_is_simpler_than_the_chosen_one(recipe: str, nodes: int) -> None:
    _, found = on_h100(recipe, nodes)
    best, fastest = found.best, found.fastest
    assert best is not None and fastest is not None
    assert best.expected_step_s <= ABOUT * fastest.expected_step_s
    alike = [one for one in found.candidates if one.expected_step_s <= ABOUT * fastest.expected_step_s]
    assert weight(best) == min(map(weight, alike))
    as_simple = [one for one in alike if weight(one) == weight(best)]
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
    """The quickstart: 5.5M parameters, 8 samples a step."""
    spec = load_for_planning(["recipe=quickstart"]).spec
    names = ("NVIDIA H100 80GB HBM3",) * gpus
    machine = Machine("node", 64, 2**40, gpu_names=names, gpu_memory_bytes=80 * 2**30, bf16=True)
    layout = plan(spec, machine).layout
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
