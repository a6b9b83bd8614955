"""Cuts into pipeline stages, held against every cut there is of small models."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate, combinations, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.drawing import slow_after

from trainspec_cli.planner.capacity import cut_on_chip, plan_capacity, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, describe_fabric
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.memory.predict import estimate_memory, memory_limit_bytes
from trainspec_cli.planner.pipeline import (
    AS_GOOD,
    Counts,
    LayerTimes,
    Room,
    cut,
    cut_by_times,
    cut_evenly,
    is_open,
    layers_per_rank,
    rank_times_s,
)
from trainspec_cli.planner.plan import plan, relative_times
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.this_machine import setup_of as setup_of_plan
from trainspec_cli.planner.time.step import estimate_step, mean_times, micro_batch, planned_times, rank_parts
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, ModelSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

ONE_STAGE = [Layout(pp=2), Layout(pp=3), Layout(pp=4), Layout(pp=5, pipeline_schedule="zero_bubble")]
SEVERAL = [
    *(Layout(pp=pp, pipeline_schedule="zbv") for pp in (2, 3, 4)),
    *(Layout(pp=pp, pipeline_schedule="interleaved", virtual_stages=v) for pp, v in ((2, 2), (2, 3), (3, 2), (4, 2))),
]
SECONDS = st.floats(0.01, 10.0)


def every_cut(layers: int, stages: int) -> Iterator[Counts]:
    for inner in combinations(range(1, layers), stages - 1):
        yield tuple(end - start for start, end in pairwise((0, *inner, layers)))


def heaviest_s(times: LayerTimes, counts: Counts, layout: Layout, speeds: tuple[float, ...] = ()) -> float:
    """Worked out layer by layer."""
    spans = list(pairwise(accumulate(counts, initial=0)))
    loads = []
    for rank in range(layout.pp):
        own = [stage for stage in range(layout.num_stages) if layout.rank_of_stage(stage) == rank]
        load = sum(sum(times.layers_s[spans[stage][0] : spans[stage][1]]) for stage in own)
        load += times.embedding_s * (0 in own) + times.head_s * (layout.num_stages - 1 in own)
        loads.append(load / (speeds[rank] if speeds else 1.0))
    return max(loads)


def keeps_to(room: Room, counts: Counts, layout: Layout) -> bool:
    spans = list(pairwise(accumulate(counts, initial=0)))
    taken = [0.0] * layout.pp
    for stage, (start, end) in enumerate(spans):
        rank = layout.rank_of_stage(stage)
        taken[rank] += sum(room.layer_bytes[rank][start:end])
    return all(size <= most + 1e-9 for size, most in zip(taken, room.capacity_bytes, strict=True))


def is_a_cut(counts: Counts, layers: int, layout: Layout) -> bool:
    return len(counts) == layout.num_stages and sum(counts) == layers and min(counts) >= 1


@st.composite
def models(draw: st.DrawFn, layouts: list[Layout]) -> tuple[Layout, LayerTimes, tuple[float, ...]]:
    """Layers of any times, of a few kinds, or all alike; ends of any weight; ranks of other speeds."""
    layout = draw(st.sampled_from(layouts))
    layers = draw(st.integers(layout.num_stages, layout.num_stages + 5))
    kinds = draw(st.lists(SECONDS, min_size=1, max_size=3))
    each = draw(st.sampled_from([SECONDS, st.sampled_from(kinds), st.just(kinds[0])]))
    layers_s = draw(st.lists(each, min_size=layers, max_size=layers))
    speed = st.sampled_from([1.0, 0.9, 0.5, 0.25])
    speeds = draw(st.one_of(st.just(()), st.tuples(*[speed] * layout.pp)))
    ends = st.sampled_from([0.0, 0.3, 5.0])
    return layout, LayerTimes(layers_s, draw(ends), draw(ends)), speeds


@given(models(ONE_STAGE))
def test_no_cut_is_lighter_with_one_stage_a_rank(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found is not None and is_a_cut(found, len(times.layers_s), layout)
    cuts = every_cut(len(times.layers_s), layout.num_stages)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in cuts)
    assert heaviest_s(times, found, layout, speeds) <= least_s * (1 + 1e-8)


@pytest.mark.slow
@given(models(SEVERAL))
def test_no_cut_is_lighter_by_a_twentieth_with_several(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found is not None and is_a_cut(found, len(times.layers_s), layout)
    cuts = every_cut(len(times.layers_s), layout.num_stages)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in cuts)
    assert heaviest_s(times, found, layout, speeds) <= least_s * 1.05


@pytest.mark.slow
@given(st.sampled_from([*ONE_STAGE, *SEVERAL]), st.integers(0, 5), SECONDS, st.floats(0, 20), st.floats(0, 20))
def test_layers_that_are_alike_are_cut_exactly(
    layout: Layout, more: int, layer_s: float, embedding_s: float, head_s: float
) -> None:
    layers = layout.num_stages + more
    times = LayerTimes([layer_s] * layers, embedding_s, head_s)
    found = cut_by_times(times, layout)
    assert found is not None and is_a_cut(found, layers, layout)
    least_s = min(heaviest_s(times, counts, layout) for counts in every_cut(layers, layout.num_stages))
    assert heaviest_s(times, found, layout) <= least_s * (1 + 1e-8)


@st.composite
def rooms(draw: st.DrawFn, layouts: list[Layout]) -> tuple[Layout, LayerTimes, Room]:
    """Capacities of whole numbers, that are sometimes too small."""
    layout = draw(st.sampled_from(layouts))
    layers = draw(st.integers(layout.num_stages, layout.num_stages + 4))
    size, alike = st.integers(1, 4), draw(st.booleans())
    row = st.lists(draw(st.just(size)), min_size=layers, max_size=layers)
    rows = [[draw(size)] * layers if alike else draw(row) for _ in range(layout.pp)]
    times = [draw(SECONDS)] * layers if alike else draw(st.lists(SECONDS, min_size=layers, max_size=layers))
    capacity = [draw(st.integers(2, 3 * layers)) for _ in range(layout.pp)]
    return layout, LayerTimes(times, 0.5, draw(st.sampled_from([0.0, 4.0]))), Room(rows, capacity)


def is_lightest(case: tuple[Layout, LayerTimes, Room], beyond: float) -> None:
    """What was found takes at most `1 + beyond` times as long as the best of all cuts that memory allows."""
    layout, times, room = case
    allowed = [c for c in every_cut(len(times.layers_s), layout.num_stages) if keeps_to(room, c, layout)]
    found = cut_by_times(times, layout, room=room)
    if not allowed:
        assert found is None
        return
    assert found is not None and is_a_cut(found, len(times.layers_s), layout) and keeps_to(room, found, layout)
    least_s = min(heaviest_s(times, counts, layout) for counts in allowed)
    assert heaviest_s(times, found, layout) <= least_s * (1 + beyond)


@given(rooms(ONE_STAGE))
def test_the_lightest_cut_that_memory_allows(case) -> None:
    is_lightest(case, 1e-8)


@given(rooms(SEVERAL))
def test_memory_bounds_several_stages_a_rank_together(case) -> None:
    is_lightest(case, 0.05)


@given(models([*ONE_STAGE, *SEVERAL]))
def test_cuts_are_repeatable_and_the_even_one_stays_where_it_is_as_good(case) -> None:
    layout, times, speeds = case
    found = cut_by_times(times, layout, speeds)
    assert found == cut_by_times(times, layout, speeds)
    even = cut_evenly(len(times.layers_s), layout.num_stages)
    if heaviest_s(times, even, layout, speeds) <= heaviest_s(times, found, layout, speeds):
        assert found == even


@given(models(ONE_STAGE))
def test_among_equals_the_fewest_layers_pass_borders(case) -> None:
    layout, times, speeds = case
    layers, even = len(times.layers_s), cut_evenly(len(times.layers_s), layout.num_stages)

    def passing(counts: Counts) -> int:
        pairs = zip(accumulate(counts), accumulate(even), strict=True)
        return sum(abs(border - own) for border, own in pairs)

    found = cut_by_times(times, layout, speeds)
    bound_s = heaviest_s(times, found, layout, speeds) * (1 - 1e-8)
    equals = [c for c in every_cut(layers, layout.num_stages) if heaviest_s(times, c, layout, speeds) <= bound_s]
    assert not equals, "none is lighter"
    same_s = heaviest_s(times, found, layout, speeds) * (1 + 1e-10)
    equals = [c for c in every_cut(layers, layout.num_stages) if heaviest_s(times, c, layout, speeds) <= same_s]
    assert passing(found) <= min(map(passing, equals))


def test_the_stage_with_the_head_gives_a_layer_to_its_neighbour() -> None:
    times = LayerTimes([1.0] * 80, 0.1, 1.2)
    assert cut_by_times(times, Layout(pp=8)) == (10, 10, 10, 10, 10, 10, 11, 9)
    assert cut_by_times(LayerTimes([1.0] * 8), Layout(pp=4)) == (2, 2, 2, 2)
    assert cut_by_times(LayerTimes([1.0] * 10), Layout(pp=4)) == (3, 3, 2, 2)
    heavy = LayerTimes([3.0, 1.0, 1.0, 1.0])
    assert cut_by_times(heavy, Layout(pp=2)) == (1, 3)


def test_a_cut_that_is_found_later_is_not_heavier() -> None:
    """The search takes up the borders it has begun with after others have lowered its bound."""
    times = LayerTimes([3.6, 8.75, 0.72, 8.51, 8.04, 6.99, 0.69, 2.87, 2.95], 0.5)
    layout, speeds = Layout(pp=3, pipeline_schedule="interleaved", virtual_stages=2), (1.0, 1.0, 0.25)
    least_s = min(heaviest_s(times, counts, layout, speeds) for counts in every_cut(9, 6))
    assert heaviest_s(times, cut_by_times(times, layout, speeds), layout, speeds) <= least_s * 1.05


def test_a_rank_at_half_speed_has_half_of_the_layers() -> None:
    times = LayerTimes([1.0] * 14)
    assert cut_by_times(times, Layout(pp=4), (1.0, 1.0, 0.5, 1.0)) == (4, 4, 2, 4)
    assert rank_times_s(times, (4, 4, 2, 4), Layout(pp=4), (1.0, 1.0, 0.5, 1.0)) == [4, 4, 4, 4]


def test_the_first_rank_of_a_v_holds_both_ends() -> None:
    times, layout = LayerTimes([1.0] * 8, 1.0, 1.0), Layout(pp=2, pipeline_schedule="zbv")
    found = cut_by_times(times, layout)
    assert (found[0] + found[3], found[1] + found[2]) == (3, 5)
    assert rank_times_s(times, found, layout) == [5, 5]


def test_a_difference_that_is_not_worth_it_leaves_the_even_cut() -> None:
    times = LayerTimes([1.0, 1.0, 1.01, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    assert cut_by_times(times, Layout(pp=3)) == (3, 3, 3)
    leaning = LayerTimes([1.0, 1.0, 1.0, 0.999])
    assert cut_by_times(LayerTimes(leaning.layers_s[::-1], 0.0, 0.5), Layout(pp=2), equal=0.5) == (2, 2)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 layers .* 4 pipeline stages"):
        cut_by_times(LayerTimes([1.0] * 3), Layout(pp=4))


@pytest.mark.parametrize("speeds", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, 1.0, 1.0)])
def test_speeds_are_one_for_each_rank(speeds: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="2 pipeline ranks"):
        cut_by_times(LayerTimes([1.0] * 3), Layout(pp=2), speeds)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("kind", ["alike", "by turns", "any"])
def test_large_models_come_near_to_what_no_cut_can_reach(schedule: str, kind: str) -> None:
    """126 layers on 16 ranks: within a layer's time of an equal share for each."""
    drawn = random.Random(126)
    layers_s = {
        "alike": [1.0] * 126,
        "by turns": [1.0, 1.0, 2.5] * 42,
        "any": [drawn.uniform(0.5, 2) for _ in range(126)],
    }
    times = LayerTimes(layers_s[kind], 0.1, 1.2)
    layout = Layout(pp=16, pipeline_schedule=schedule, virtual_stages=2 if schedule == "interleaved" else 1)
    found = cut_by_times(times, layout)
    share_s = (sum(times.layers_s) + 1.3) / 16
    assert is_a_cut(found, 126, layout)
    assert heaviest_s(times, found, layout) <= share_s + max(times.layers_s) / 2


# Pipeline stages cut by planned times: of models whose layers differ, within memory, and on any machine


EFF = Efficiency()
DENSE = DecoderModel(12, 4096, 32, 8, 128, 14336, 128_256)
EXPERTS = ExpertSpec(num_experts=16, top_k=4, expert_ffn_size=4096, first_dense_layers=3)
HYBRID = HybridModel(
    4096, 131_072, mamba_layers=6, attention_layers=1, mlp_layers=5, num_heads=32, num_kv_heads=8, ffn_size=16384,
    layer_pattern="M-M-M-M*-M-M",
)  # fmt: skip
MODELS: dict[str, ModelSpec] = {
    "dense": DENSE,
    "leading dense layers": replace(DENSE, experts=EXPERTS),
    "every second with experts": replace(DENSE, experts=replace(EXPERTS, first_dense_layers=0, every=2)),
    "hybrid": HYBRID,
    "windows": replace(DENSE, sliding_window=512, global_attention_every=4),
    "small, large vocabulary": replace(DENSE, num_layers=11, hidden_size=1024, ffn_size=3072, num_heads=8),
}
LAYOUTS = [
    Layout(pp=4),
    Layout(pp=3, pipeline_schedule="zero_bubble"),
    Layout(pp=2, pipeline_schedule="zbv"),
    Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2),
]


def spec_of(model: ModelSpec = DENSE, **changes: Any) -> RunSpec:
    spec = RunSpec(
        model=model,
        data=DataSpec(seq_len=8192, source="tokens"),
        optim=OptimSpec(lr=1e-4),
        batching=BatchingSpec(global_batch_size=64, micro_batch_size=1),
        train=TrainSection(max_steps=10),
        cluster=ClusterSpec(devices_per_node=4, accelerator=find_accelerator("H100-SXM-80GB")),
        layout=LayoutSpec(dp_shard=1, dp_replicate=1, pp=4),
        compile=True,
    )
    return replace(spec, **changes)


def setup_of(model: ModelSpec, layout: Layout, **changes: Any) -> Setup:
    spec = spec_of(model)
    template = template_of(spec, describe_fabric(spec.cluster, None))
    return replace(template, layout=layout, grad_accum=16, **changes)


def heaviest_s_of_cut(setup: Setup) -> float:
    once = micro_batch(setup, axis_groups(setup.layout, setup.fabric, EFF), EFF)
    return max(rank.time_s(setup) for rank in rank_parts(once, setup.layout))


def every_cut_of_cut(setup: Setup) -> list[Setup]:
    layers, stages = setup.model.num_layers, setup.layout.num_stages
    borders = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    cuts = (tuple(end - start for start, end in pairwise(each)) for each in borders)
    return [replace(setup, layout=replace(setup.layout, stage_layers=each)) for each in cuts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.pipeline_schedule}-{layout.pp}")
@pytest.mark.parametrize("name", slow_after(2, MODELS))
def test_no_cut_makes_the_heaviest_rank_much_lighter(name: str, layout: Layout) -> None:
    """In the terms of the planned step itself, for models whose layers differ, with and without recomputation."""
    setup = setup_of(MODELS[name], layout, recompute=RECOMPUTE["full" if layout.pp == 3 else "none"])
    once = micro_batch(setup, axis_groups(layout, setup.fabric, EFF), EFF)
    found = replace(setup, layout=cut(planned_times(once, setup), layout))
    least_s = min(heaviest_s_of_cut(other) for other in every_cut_of_cut(setup))
    several = layout.num_stages > layout.pp
    assert heaviest_s_of_cut(found) <= least_s * (1.05 if several else 1 + 2 * AS_GOOD)


def test_times_are_those_of_the_step() -> None:
    setup = setup_of(MODELS["leading dense layers"], Layout(pp=4), recompute=RECOMPUTE["full"])
    once = micro_batch(setup, axis_groups(setup.layout, setup.fabric, EFF), EFF)
    times = planned_times(once, setup)
    assert len(set(times.layers_s[:3])) == len(set(times.layers_s[3:])) == 1 != len(set(times.layers_s))
    ranks = [rank.time_s(setup) for rank in rank_parts(once, setup.layout)]
    assert sum(times.layers_s) + times.embedding_s + times.head_s == pytest.approx(sum(ranks))
    mean = mean_times(once, setup)
    assert len(set(mean.layers_s)) == 1 and sum(mean.layers_s) == pytest.approx(sum(times.layers_s))


def test_the_step_becomes_faster_and_the_even_cut_stays_where_it_is_as_good() -> None:
    setup = setup_of(DENSE, Layout(pp=4))
    found, _ = cut_on_chip(setup, "none", EFF)
    assert found.layout.stage_layers is not None and found.layout.stage_layers[-1] < 3
    assert estimate_step(found, EFF).total_s < 0.97 * estimate_step(setup, EFF).total_s
    headless = replace(setup, model=replace(DENSE, vocab_size=64))
    assert cut_on_chip(headless, "none", EFF)[0] == headless


def test_what_the_recipe_pins_is_kept() -> None:
    pinned = setup_of(DENSE, Layout(pp=4, stage_layers=(1, 1, 1, 9)))
    assert cut_on_chip(pinned, "none", EFF)[0] == pinned
    assert is_open(Layout(pp=2), DENSE) and not is_open(Layout(), DENSE) and not is_open(Layout(pp=13), DENSE)


def fullest_bytes(setup: Setup) -> float:
    return max(stage.total_bytes for stage in estimate_memory(setup))


def with_memory(setup: Setup, size: float) -> Setup:
    chip = setup.fabric.chip
    chip = replace(chip, memory_gb=chip.memory_gb * size / memory_limit_bytes(chip))
    return replace(setup, fabric=replace(setup.fabric, chip=chip))


ESTIMATED = "uniform"
"""Recomputation of another framework, whose memory is estimated."""


def test_a_device_that_the_best_cut_does_not_fit_gets_the_best_that_does() -> None:
    """Layers that predict further tokens stand on the last rank. A layer takes more on an earlier rank."""
    model = replace(DENSE, vocab_size=1024, prediction_layers=4)
    setup = setup_of(model, Layout(pp=4), recompute=RECOMPUTE["full"])
    best, _ = cut_on_chip(setup, ESTIMATED, EFF)
    assert best.layout.stage_layers == (3, 4, 4, 1)
    second = replace(setup, layout=Layout(pp=4, stage_layers=(3, 3, 4, 2)))
    sizes = [fullest_bytes(each) for each in (setup, second, best)]
    assert sizes == sorted(set(sizes))
    for size, layers in zip(sizes, (None, (3, 3, 4, 2), (3, 4, 4, 1)), strict=True):
        found, memory = cut_on_chip(with_memory(setup, size * 1.0001), ESTIMATED, EFF)
        assert found.layout.stage_layers == layers
        assert max(stage.total_bytes for stage in memory) == size


def test_memory_bounds_all_stages_of_a_rank_together() -> None:
    """Layers that predict further tokens stand on the second rank, whose layers go to the first as far as they fit."""
    model = replace(DENSE, vocab_size=1024, prediction_layers=4)
    layout = Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    setup = setup_of(model, layout, recompute=RECOMPUTE["full"])
    best, _ = cut_on_chip(setup, ESTIMATED, EFF)
    held = layers_per_rank(12, best.layout)
    assert held[0] - held[1] >= 4
    assert cut_on_chip(with_memory(setup, fullest_bytes(best) * 1.0001), ESTIMATED, EFF)[0].layout == best.layout
    within, _ = cut_on_chip(with_memory(setup, fullest_bytes(best) * 0.9999), ESTIMATED, EFF)
    assert layers_per_rank(12, within.layout) == (held[0] - 1, held[1] + 1)


def test_without_a_chip_flops_decide() -> None:
    times = relative_times(DENSE, 8192.0, 8192, Layout(pp=4))
    layer = 2 * 8192 * (4096 * 128 * 2 * 40 + 3 * 4096 * 14336) + 4 * 8192 * 4096 * 4096
    assert times.layers_s == pytest.approx([layer] * 12)
    assert (times.embedding_s, times.head_s) == (0.0, 2 * 8192 * 4096 * 128_256)
    kinds = relative_times(MODELS["windows"], 8192.0, 8192, Layout()).layers_s
    assert kinds[3] > kinds[0] == kinds[1] == kinds[2] and kinds[7] == kinds[3]


# Both doors


H100S = Machine("node", 64, 2**40, gpu_names=("NVIDIA H100 80GB HBM3",) * 4, gpu_memory_bytes=80 * 2**30, bf16=True)
UNKNOWN = replace(H100S, gpu_names=("Unheard-of 9000",) * 4)


def test_a_launch_on_known_gpus_runs_the_planned_cut() -> None:
    spec = spec_of(cluster=ClusterSpec(devices_per_node=4))
    got = plan(spec, H100S)
    assert got.layout.stage_layers is not None and got.layout.stage_layers[-1] < 3
    setup = setup_of_plan(got, H100S)
    once = micro_batch(setup, axis_groups(got.layout, setup.fabric, EFF), EFF)
    assert got.layout == cut(planned_times(once, setup), replace(got.layout, stage_layers=None))
    assert got.layout != plan(spec, UNKNOWN).layout, "by FLOPs alone the head is heavier"
    pinned = replace(spec, layout=replace(spec.layout, stage_layers=(3, 3, 3, 3)))
    assert plan(pinned, H100S).layout.stage_layers == (3, 3, 3, 3)


def test_elsewhere_flops_cut() -> None:
    spec = spec_of(cluster=ClusterSpec(devices_per_node=4))
    wanted = cut(relative_times(DENSE, 8192.0, 8192, Layout(pp=4)), Layout(pp=4)).stage_layers
    assert wanted is not None and plan(spec, UNKNOWN).layout.stage_layers == wanted
    laptop = Machine("laptop", cpu_cores=4, memory_bytes=2**34)
    assert (
        plan(replace(spec, cluster=ClusterSpec(devices_per_node=4, device="cpu")), laptop).layout.stage_layers == wanted
    )


def test_the_search_shows_the_cut_and_times_it() -> None:
    found = plan_capacity(spec_of()).candidates[0]
    assert found.layout.stage_layers is not None and sum(found.layout.stage_layers) == 12
    even = plan_capacity(spec_of(layout=LayoutSpec(dp_shard=1, dp_replicate=1, pp=4, stage_layers=(3,) * 4)))
    assert found.step_time_s < 0.97 * even.candidates[0].step_time_s
    assert found.time.total_s == found.step_time_s
