"""`layout=auto` on GPUs that were found: the fastest layout that fits and that the engine runs."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from lab.drawing import slow_after

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import (
    NEAR,
    as_plan,
    best_candidate,
    is_searched,
    pin_layout,
    plan_best,
    plan_capacity,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.search.search import ABOUT, complexity
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.planner.this_machine import device_limit_bytes, predict_device
from trainspec_cli.planner.validation.backtest import SWEEP_KEYS, backtest
from trainspec_cli.planner.validation.table import frameworks
from trainspec_cli.recipe.compose.folders import find_folders
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.recipe.results.plan import Candidate, CapacityPlan
from trainspec_cli.recipe.rules.check import check, check_built, check_engine
from trainspec_cli.recipe.rules.layout import whole_hosts
from trainspec_cli.session.planning.plan import plan_loaded, plan_recipe
from trainspec_cli.session.recipe.load import load_for_planning
from trainspec_cli.wings.interop import layout_of
from trainspec_cli.wings.interop.commands.emit import resolved

H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 8, gpu_memory_bytes=80 * 2**30, bf16=True)
OPEN = LayoutSpec(cp=AUTO, tp=AUTO, pp=AUTO, ep=AUTO, zero_stage=AUTO, pipeline_schedule=AUTO, virtual_stages=AUTO)


def spec_of(layers: int, layout: LayoutSpec = OPEN) -> RunSpec:
    return RunSpec(
        model=DecoderModel(layers, 4096, 32, 8, 128, 14336, 128256),
        data=DataSpec(seq_len=4096, source="python_stdlib"),
        optim=OptimSpec(lr=1e-3),
        batching=BatchingSpec(global_batch_size=64),
        train=TrainSection(max_steps=1),
        layout=layout,
        recompute=AUTO,
    )


@pytest.mark.parametrize("layers", [4, 32])
def test_the_fastest_that_fits_is_run(layers: int) -> None:
    planned = plan(spec_of(layers), H100S)
    best = best_candidate(spec_of(layers), H100S, 8)
    assert best is not None
    assert (planned.layout, planned.micro_batch_size) == (best.layout, best.micro_batch_size)
    assert planned.layout.world_size == 8
    assert predict_device(planned, H100S).needed_bytes <= device_limit_bytes(planned, H100S)


PINNED = replace(
    spec_of(4, LayoutSpec(dp_replicate=1, dp_shard=8)), batching=BatchingSpec(64, micro_batch_size=1), recompute="none"
)


def test_what_is_pinned_and_unknown_chips_are_not_searched() -> None:
    assert is_searched(spec_of(4), H100S, "cuda")
    assert not is_searched(spec_of(4), H100S, "cpu")
    assert not is_searched(PINNED, H100S, "cuda")
    assert not is_searched(spec_of(4), replace(H100S, gpu_names=("Abacus-9000",) * 8), "cuda")
    assert check_built(PINNED) == []


@pytest.mark.parametrize("axis", ["cp", "tp", "pp", "ep", "dp_shard", "dp_replicate"])
def test_one_open_axis_is_enough_for_a_search(axis: str) -> None:
    opened = replace(PINNED, layout=replace(PINNED.layout, **{axis: AUTO}))  # type: ignore[arg-type]
    assert is_searched(opened, H100S, "cuda")
    assert not is_searched(opened, replace(H100S, gpu_names=()), "cuda")


@pytest.mark.parametrize(
    "opened",
    [{"recompute": AUTO}, {"offload": AUTO}, {"batching": BatchingSpec(64)}],
    ids=["recompute", "offload", "micro-batch"],
)
def test_what_saves_memory_is_searched_in_a_pinned_layout_too(opened: dict[str, Any]) -> None:
    """A run is given what its plan chose."""
    spec = replace(PINNED, **opened)
    assert is_searched(spec, H100S, "cuda")
    planned, best = plan(spec, H100S), best_candidate(spec, H100S, 8)
    assert best is not None
    run = planned.micro_batch_size, planned.recompute, planned.offload
    assert run == (best.micro_batch_size, best.recompute, best.offload)


def test_the_gpus_at_hand_are_planned_for_whatever_the_recipe_describes() -> None:
    elsewhere = replace(spec_of(4), cluster=ClusterSpec(devices_per_node=64))
    best = best_candidate(elsewhere, H100S, 8)
    assert best is not None and best.layout.world_size == 8
    assert best == best_candidate(spec_of(4), H100S, 8)


def test_nothing_is_run_where_nothing_fits() -> None:
    tiny = replace(H100S, gpu_memory_bytes=2**28)
    planned = plan(spec_of(1, LayoutSpec()), tiny)
    assert planned.layout == Layout(dp_replicate=8, sequence_parallel=False), "as where nothing is searched"
    assert planned.recompute == "none"


RAMP = BatchScheduleSpec(kind="ramp", stages=(RampStage(4096 * 64 * 2, 256),))


def test_a_run_whose_batch_grows_begins_with_the_micro_batches_of_its_first_size() -> None:
    growing = replace(
        spec_of(4, LayoutSpec(dp_shard=AUTO, dp_replicate=1, tp=1)),
        batching=BatchingSpec(64, micro_batch_size=1, schedule=RAMP),
        train=TrainSection(max_steps=1000),
    )
    best = best_candidate(growing, H100S, 8)
    assert best is not None
    assert (best.micro_batch_size, best.grad_accum_steps) == (1, 8)
    capacity = plan_capacity(replace(growing, cluster=ClusterSpec(devices_per_node=8)), H100S)
    (shown, *_) = capacity.candidates
    assert shown.grad_accum_steps == 32, "the size that trains most samples"
    assert as_plan(growing, shown, capacity, "bf16").grad_accum_steps == 8


def test_a_candidate_as_the_engine_is_given_it() -> None:
    spec = replace(spec_of(4), cluster=ClusterSpec(num_nodes=2, devices_per_node=4), offload="optimizer")
    capacity = plan_capacity(spec, H100S)
    (shown, *_) = capacity.candidates
    made = as_plan(spec, shown, capacity, "bf16")
    assert (made.layout, made.micro_batch_size, made.recompute) == (
        shown.layout, shown.micro_batch_size, shown.recompute,
    )  # fmt: skip
    assert (made.device, made.num_nodes, made.devices_per_node, made.compute) == ("cuda", 2, 4, "bf16")
    assert (made.offload, made.params, made.flops_per_token) == (
        "optimizer", capacity.params, capacity.flops_per_token,
    )  # fmt: skip
    on_device = replace(shown, offload="none")
    assert as_plan(replace(spec, offload=AUTO), on_device, capacity, "fp32").offload == "none"
    assert as_plan(spec, shown, capacity, "fp32").compute == "fp32"


@pytest.mark.parametrize(
    ("resilience", "replicas", "expected"),
    [
        (ResilienceSpec(), 4, (4, 1)),
        (ResilienceSpec(mode="elastic"), 4, (1, 4)),
        (ResilienceSpec(mode="elastic"), 1, (1, 1)),
        (ResilienceSpec(mode="elastic", replica_groups=2), 4, (2, 2)),
    ],
    ids=["restart", "each replica a group", "one", "as asked for"],
)
def test_the_replicas_of_a_search_divide_into_groups(
    resilience: ResilienceSpec, replicas: int, expected: tuple[int, int]
) -> None:
    """(replicas inside a group, groups); the recipe that asks for this layout means the same."""
    spec = replace(spec_of(4), resilience=resilience)
    layout, groups = one_group(spec, Layout(dp_replicate=replicas))
    assert (layout.dp_replicate, groups) == expected
    pinned = pin_layout(spec, Layout(dp_replicate=replicas))
    assert pinned.layout.dp_replicate == expected[0]
    assert pinned.resilience.replica_groups in (expected[1], AUTO)


@pytest.mark.parametrize(("wanted", "groups"), [(2, 2), (4, 4), (AUTO, None)])
def test_a_searched_layout_is_divided_into_replica_groups(wanted: Any, groups: int | None) -> None:
    """Each group has a layout of its own, and all of them together are the eight GPUs and the whole batch."""
    spec = replace(spec_of(4), resilience=ResilienceSpec(mode="elastic", replica_groups=wanted))
    planned = plan(spec, H100S)
    assert planned.replica_groups == (groups or planned.replica_groups) >= 2
    assert planned.layout.world_size * planned.replica_groups == 8
    share = planned.replica_groups * planned.layout.data_parallel_size
    assert planned.micro_batch_size * planned.grad_accum_steps * share >= 64


def test_replicas_inside_each_group_are_kept() -> None:
    layout = replace(OPEN, dp_replicate=2, tp=1, pp=1, cp=1, ep=1)
    spec = replace(spec_of(2, layout), resilience=ResilienceSpec(mode="elastic", replica_groups=2))
    planned = plan(spec, H100S)
    assert (planned.replica_groups, planned.layout.dp_replicate, planned.layout.dp_shard) == (2, 2, 2)
    counted = replace(spec, resilience=ResilienceSpec(mode="elastic"))
    planned = plan(counted, H100S)
    assert (planned.replica_groups, planned.layout.dp_replicate, planned.layout.dp_shard) == (2, 1, 4)


def test_groups_of_a_search_take_whole_hosts_or_share_one() -> None:
    spec = replace(spec_of(2), cluster=ClusterSpec(num_nodes=3), batching=BatchingSpec(48))
    spec = replace(spec, resilience=ResilienceSpec(mode="elastic", replica_groups=2))
    with pytest.raises(RecipeError, match=r"3 nodes .* 2 replica groups"):
        plan(spec, H100S)


# Which of the layouts that predictions do not tell apart is chosen, and that every command chooses from one set


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
    slow_after(
        1,
        [
            ("llama3_8b", 1),
            ("llama3_70b", 32),
            pytest.param("llama3_405b", 128, marks=pytest.mark.slow),
            ("qwen3_14b", 4),
            ("gpt_oss_20b", 2),
        ],
    ),
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


@pytest.mark.slow
def test_a_large_model_has_no_more_stages_than_an_expert_would_give_it() -> None:
    """405B on 1,024 H100 with Megatron-LM, whose products hide exchanges of tensor parallelism, as Meta's did: tp 8,
    pp 16. trainspec's engine waits for those of the forward pass, so its own plan has fewer of them."""
    _, found = on_h100("llama3_405b", 128, "framework=megatron")
    assert found.best is not None and found.usual is not None
    assert (found.best.layout.tp, found.best.layout.pp) == (8, 16)
    assert found.usual.layout.tp == 8 and found.usual.layout.cp == 1 and found.usual.layout.pp <= 16
    assert found.usual.step_time_s > found.best.step_time_s


@pytest.mark.parametrize("gpus", [1, 2, 4, 6, 8])
def test_a_small_model_is_data_parallel_on_detected_gpus(gpus: int) -> None:
    """The quickstart: 6.4M parameters, 16 samples per step."""
    layout = plan(load_for_planning(["recipe=quickstart"]).spec, with_h100s(gpus)).layout
    assert layout.data_parallel_size == layout.world_size == gpus


QUICK = ("llama3_8b", "tiny_moe", "nemotron_h_8b", "resnet50", "tiny")
"""One recipe per family."""


@pytest.mark.parametrize("recipe", [*QUICK, *slow_after(0, (name for name in RECIPES if name not in QUICK))])
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


@pytest.mark.slow
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
    ("groups", "inside"), slow_after(1, [(2, AUTO), (4, AUTO), (8, AUTO), (4, 2), (AUTO, AUTO), (AUTO, 4)]), ids=str
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


@pytest.mark.slow
@pytest.mark.parametrize("disturb", slow_after(1, ["node_leaves", "slow_node", "slow_device"]))
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
