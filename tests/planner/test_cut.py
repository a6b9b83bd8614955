"""Pipeline stages cut by planned times: of models whose layers differ, within memory, and on any machine."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from trainspec_cli.planner.capacity import cut_on_chip, plan_capacity, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, describe_fabric
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator
from trainspec_cli.planner.memory.predict import estimate_memory, memory_limit_bytes
from trainspec_cli.planner.pipeline import AS_GOOD, cut, is_open, layers_per_rank
from trainspec_cli.planner.plan import plan, relative_times
from trainspec_cli.planner.setup import RECOMPUTE, Setup
from trainspec_cli.planner.this_machine import setup_of as setup_of_plan
from trainspec_cli.planner.time.step import estimate_step, mean_times, micro_batch, planned_times, rank_parts
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec, HybridModel, ModelSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

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


def heaviest_s(setup: Setup) -> float:
    once = micro_batch(setup, axis_groups(setup.layout, setup.fabric, EFF), EFF)
    return max(rank.time_s(setup) for rank in rank_parts(once, setup.layout))


def every_cut(setup: Setup) -> list[Setup]:
    layers, stages = setup.model.num_layers, setup.layout.num_stages
    borders = ((0, *inner, layers) for inner in combinations(range(1, layers), stages - 1))
    cuts = (tuple(end - start for start, end in pairwise(each)) for each in borders)
    return [replace(setup, layout=replace(setup.layout, stage_layers=each)) for each in cuts]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.pipeline_schedule}-{layout.pp}")
@pytest.mark.parametrize("name", MODELS)
def test_no_cut_makes_the_heaviest_rank_much_lighter(name: str, layout: Layout) -> None:
    """In the terms of the planned step itself, for models whose layers differ, with and without recomputation."""
    setup = setup_of(MODELS[name], layout, recompute=RECOMPUTE["full" if layout.pp == 3 else "none"])
    once = micro_batch(setup, axis_groups(layout, setup.fabric, EFF), EFF)
    found = replace(setup, layout=cut(planned_times(once, setup), layout))
    least_s = min(heaviest_s(other) for other in every_cut(setup))
    several = layout.num_stages > layout.pp
    assert heaviest_s(found) <= least_s * (1.05 if several else 1 + 2 * AS_GOOD)


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


def test_a_device_that_the_best_cut_does_not_fit_gets_the_best_that_does() -> None:
    """Layers that predict further tokens stand on the last rank. A layer takes more on an earlier rank."""
    model = replace(DENSE, vocab_size=1024, prediction_layers=4)
    setup = setup_of(model, Layout(pp=4), recompute=RECOMPUTE["full"])
    best, _ = cut_on_chip(setup, "full", EFF)
    assert best.layout.stage_layers == (3, 4, 4, 1)
    second = replace(setup, layout=Layout(pp=4, stage_layers=(3, 3, 4, 2)))
    sizes = [fullest_bytes(each) for each in (setup, second, best)]
    assert sizes == sorted(set(sizes))
    for size, layers in zip(sizes, (None, (3, 3, 4, 2), (3, 4, 4, 1)), strict=True):
        found, memory = cut_on_chip(with_memory(setup, size * 1.0001), "full", EFF)
        assert found.layout.stage_layers == layers
        assert max(stage.total_bytes for stage in memory) == size


def test_memory_bounds_all_stages_of_a_rank_together() -> None:
    """Layers that predict further tokens stand on the second rank, whose layers go to the first as far as they fit."""
    model = replace(DENSE, vocab_size=1024, prediction_layers=4)
    layout = Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    setup = setup_of(model, layout, recompute=RECOMPUTE["full"])
    best, _ = cut_on_chip(setup, "full", EFF)
    held = layers_per_rank(12, best.layout)
    assert held[0] - held[1] >= 4
    assert cut_on_chip(with_memory(setup, fullest_bytes(best) * 1.0001), "full", EFF)[0].layout == best.layout
    within, _ = cut_on_chip(with_memory(setup, fullest_bytes(best) * 0.9999), "full", EFF)
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
