"""`layout=auto` on GPUs that were found: the fastest layout that fits and that the engine runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import as_plan, best_candidate, is_searched, pin_layout, plan_capacity
from trainspec_cli.planner.plan import plan
from trainspec_cli.planner.search.space import one_group
from trainspec_cli.planner.this_machine import device_limit_bytes, predict_device
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.recipe.rules.engine import check_built

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
    with pytest.raises(RecipeError, match="3 nodes do not divide over 2 replica groups"):
        plan(spec, H100S)
