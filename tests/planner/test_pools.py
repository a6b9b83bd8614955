"""A cluster of several pools, against the planner of one: arithmetic that is easy to check on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.planner.capacity import plan_capacity, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, efficiency_of, on_pools
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.pools.plan import PoolSearch, compare_pools, plan_pools, stages_on
from trainspec_cli.planner.pools.step import Placement, Stopwatch, describe_pools, groups_of, placements
from trainspec_cli.planner.run.forecast import forecast_run
from trainspec_cli.planner.time.step import micro_batch, rank_parts
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec, PoolSpec
from trainspec_cli.recipe.keys.layout import Layout, LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel, ExpertSpec
from trainspec_cli.recipe.keys.run import DataSpec, PrecisionSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec

FAST = AcceleratorSpec(
    *("fast", "nvidia", 500.0, 80.0, 3.0),
    matmul_bf16_tflops=400.0,
    link_gb_per_s=300.0,
    link_kind="nvswitch",
    tdp_w=700.0,
    price_usd_per_hour=3.0,
)
NO_WAITING = {
    "jitter": 0.0,
    "step_s": 0.0,
    "step_graphed_s": 0.0,
    "launch_s": 0.0,
    "collective_latency_s": 0.0,
    "hop_latency_s": 0.0,
    "kernel_s": 0.0,
}
SPEC = RunSpec(
    model=DecoderModel(8, 2048, 16, 16, 128, 8192, 8192),
    data=DataSpec(seq_len=2048, source="tokens"),
    optim=OptimSpec(lr=1e-4),
    batching=BatchingSpec(global_batch_size=96, micro_batch_size=2),
    train=TrainSection(max_steps=100),
    cluster=ClusterSpec(nic_gbit_per_s=400.0),
    layout=LayoutSpec(dp_shard=1),
    recompute="none",
    offload="none",
    compile=True,
)


def slower(chip: AcceleratorSpec, times: float) -> AcceleratorSpec:
    """All of a chip's rates but that of its links, so many times lower."""
    rates = ("bf16_tflops", "matmul_bf16_tflops", "memory_tb_per_s")
    return replace(chip, name="slow", **{name: getattr(chip, name) / times for name in rates})


def over(*pools: PoolSpec, spec: RunSpec = SPEC, **layout: Any) -> RunSpec:
    return on_pools(replace(spec, layout=replace(spec.layout, **layout)), pools)


@pytest.mark.parametrize(
    "layout",
    [{"pp": 1}, {"pp": 1, "dp_shard": 16, "zero_stage": 3}, {"pp": 2}, {"pp": 2, "tp": 2, "pipeline_schedule": "1f1b"}],
)
def test_two_equal_pools_have_the_figures_of_one_of_double_size(layout: dict[str, Any]) -> None:
    spec = replace(SPEC, batching=BatchingSpec(global_batch_size=128, micro_batch_size=2))
    pipelines = layout["pp"] == 2
    pool, double = PoolSpec(FAST, 1 + pipelines, 8), PoolSpec(FAST, 2 + 2 * pipelines, 8)
    two, single = over(pool, pool, spec=spec, **layout), over(double, spec=spec, **layout)
    both, one = plan_pools(two), plan_capacity(single)
    assert both.best and one.best
    assert {candidate.pipelines_cross_pools for candidate in both.candidates} == {False, pipelines}
    for kind in {False, pipelines}:
        found = next(candidate for candidate in both.candidates if candidate.pipelines_cross_pools == kind)
        assert found.step_time_s == pytest.approx(one.best.step_time_s, rel=1e-9)
        assert found.mfu == pytest.approx(one.best.mfu, rel=1e-9)
        assert found.peak_memory_bytes == pytest.approx(one.best.peak_memory_bytes, rel=1e-9)
    runs = forecast_run(two, both, both.best), forecast_run(single, one, one.best)
    for name in ("wall_time_s", "energy_joules", "cost_usd"):
        assert getattr(runs[0], name).value == pytest.approx(getattr(runs[1], name).value, rel=1e-3)


@pytest.mark.parametrize("times", [2.0, 3.0])
def test_a_slow_pool_has_samples_by_its_speed_and_the_step_takes_as_long_as_that_says(times: float) -> None:
    """Work that takes T on the fast pool alone takes T / (1 + 1/times) on both, where next to nothing is exchanged."""
    efficiency = NO_WAITING | {"dp_overlap": 1.0, "contention": 0.0}
    spec = replace(
        SPEC,
        cluster=replace(SPEC.cluster, efficiency=efficiency, nic_gbit_per_s=4e5),
        batching=BatchingSpec(global_batch_size=1920, micro_batch_size=4),
        compile=True,
    )
    pools = PoolSpec(FAST, 1, 8), PoolSpec(slower(FAST, times), 1, 8)
    mixed = plan_pools(over(*pools, spec=spec)).best
    alone = plan_capacity(over(pools[0], spec=spec)).best
    assert mixed and alone
    fast, slow = mixed.pools
    assert fast.samples + slow.samples == 1920
    assert times <= fast.samples / slow.samples <= 1.2 * times, "what each micro-batch costs weighs more on small ones"
    assert mixed.step_time_s == pytest.approx(alone.step_time_s / (1 + 1 / times), rel=0.04)
    assert max(part.waiting_s for part in mixed.pools) < 0.03 * mixed.step_time_s


def test_a_slow_pool_has_layers_by_its_speed() -> None:
    pools = PoolSpec(FAST, 1, 8), PoolSpec(slower(FAST, 3.0), 1, 8)
    found = plan_pools(over(*pools, pp=2, pipeline_schedule="1f1b")).candidates
    crossing = next(candidate for candidate in found if candidate.pipelines_cross_pools)
    fast, slow = crossing.pools
    assert fast.layers + slow.layers == SPEC.model.num_layers and fast.layers >= 2 * slow.layers
    assert sum(crossing.layout.stage_layers or ()) == SPEC.model.num_layers


def test_each_pool_keeps_to_its_own_memory() -> None:
    """A pool of small devices bounds the micro-batch that others could hold."""
    small = replace(slower(FAST, 1.0), memory_gb=24.0)
    layout = LayoutSpec(tp=1, cp=1, pp=1, ep=1, dp_shard=1)
    auto = replace(SPEC, batching=BatchingSpec(global_batch_size=96), layout=layout)
    found = plan_pools(over(PoolSpec(FAST, 1, 8), PoolSpec(small, 1, 8), spec=auto))
    assert found.best
    for candidate in found.candidates:
        parts = [part.peak_memory_bytes / part.memory_limit_bytes for part in candidate.pools]
        assert candidate.fits == (max(parts) <= 1) and max(parts) == pytest.approx(
            candidate.peak_memory_bytes / candidate.memory_limit_bytes
        )
    none = replace(small, memory_gb=4.0)
    refused = plan_pools(over(PoolSpec(FAST, 1, 8), PoolSpec(none, 1, 8), spec=auto))
    assert refused.best is None and refused.rejected["memory"]


def test_money_and_energy_are_each_pools_own() -> None:
    """Three dollars an hour and one, for as many devices: two in the mean."""
    cheap = PoolSpec(FAST, 1, 8, price_usd_per_device_hour=1.0)
    spec = over(PoolSpec(FAST, 1, 8), cheap)
    plan = plan_pools(spec)
    assert plan.best
    run = forecast_run(spec, plan, plan.best)
    assert run.cost_usd and run.energy_joules
    assert run.cost_usd.value == pytest.approx(16 * 2.0 * run.wall_time_s.value / 3600)
    assert {one.key for one in run.assumptions} >= {
        "cluster.pools.0.accelerator.price_usd_per_hour",
        "cluster.pools.1.price_usd_per_device_hour",
    }


def test_the_comparison_says_when_fewer_pools_are_faster_or_cheaper() -> None:
    dear = replace(slower(FAST, 4.0), price_usd_per_hour=3.0)
    spec = over(PoolSpec(FAST, 1, 8), PoolSpec(dear, 1, 8), tp=1, pp=1)
    compared = compare_pools(spec, plan_pools(spec))
    assert [choice.pools for choice in compared.choices] == [("fast", "slow"), ("fast",), ("slow",)]
    both, fast, _ = compared.choices
    assert both.tokens_per_s and fast.tokens_per_s and both.usd_per_token and fast.usd_per_token
    assert both.tokens_per_s > fast.tokens_per_s and both.usd_per_token > fast.usd_per_token
    assert "all pools are" in compared.verdict and "fast alone is" in compared.verdict
    narrow = replace(spec, cluster=replace(spec.cluster, pool_link_gbit_per_s=0.1))
    assert "fast alone is" in compare_pools(narrow, plan_pools(narrow)).verdict.partition(";")[0]


def test_groups_that_cut_layers_stay_in_a_pool_and_the_others_are_as_fast_as_the_slower_pool() -> None:
    slow = replace(PoolSpec(FAST, 1, 8), nic_gbit_per_s=50.0)
    pools, eff = describe_pools(over(PoolSpec(FAST, 2, 8), slow).cluster), Efficiency()
    layout = Layout(tp=4, dp_replicate=6)
    assert list(placements(layout, pools)) == [Placement((4, 2))]
    groups = groups_of(layout, Placement((4, 2)), pools, eff)
    assert all(not own["tp"].crosses for own in groups)
    narrow_bytes_per_s = axis_groups(layout, pools[1].fabric, eff)["dp"].nic_bytes_per_s
    assert [own["dp"].nic_bytes_per_s for own in groups] == [narrow_bytes_per_s] * 2
    assert not list(placements(Layout(tp=8, cp=3), pools)), "a group would have ranks in both pools"
    crossing = [found for found in placements(Layout(tp=8, pp=3), pools) if found.order]
    assert {found.order for found in crossing} == {(0, 1), (1, 0)}
    assert stages_on(1, Placement((2, 1), (1, 0)), Layout(tp=8, pp=3)) == [0]


CHIPS = st.builds(
    lambda speed, memory: replace(slower(FAST, speed), memory_gb=memory), st.floats(1.0, 6.0), st.sampled_from([40, 80])
)


@settings(max_examples=10, deadline=None)
@given(chip=CHIPS, nodes=st.integers(1, 3), batch=st.sampled_from([48, 96, 130]), link=st.sampled_from([None, 20, 200]))
def test_of_any_two_pools(chip: AcceleratorSpec, nodes: int, batch: int, link: float | None) -> None:
    """Samples and layers are all there, no pool is done after the step, and two pools are never faster than the sum."""
    spec = replace(SPEC, batching=BatchingSpec(global_batch_size=batch, micro_batch_size=2))
    spec = replace(spec, cluster=replace(spec.cluster, pool_link_gbit_per_s=link), layout=LayoutSpec(dp_shard=1, tp=2))
    both = over(PoolSpec(FAST, 1, 8), PoolSpec(chip, nodes, 8), spec=spec)
    search = PoolSearch(both, describe_pools(both.cluster), efficiency_of(both.cluster))
    for placed in search.run(4):
        step = placed.step
        if placed.placement.order:
            assert step.samples == (batch, batch)
        else:
            assert sum(step.samples) == batch
        for time, wait in zip(step.of_pools, step.waiting_s, strict=True):
            assert 0 <= wait <= time.total_s <= step.time.total_s * (1 + 1e-9)
            assert time.total_s == pytest.approx(step.time.total_s, rel=1e-6)
        bound_s = search.watch.bound_s(placed.setups, placed.placement, batch)
        assert 0 < bound_s <= step.time.total_s


SLOW = pytest.mark.slow
NARROW = {
    "model": replace(SPEC.model, num_layers=60, hidden_size=512, num_heads=4, num_kv_heads=4, vocab_size=262_144),
    "cluster": ClusterSpec(nic_gbit_per_s=4e5, efficiency=NO_WAITING | {"dp_overlap": 1.0, "contention": 0.0}),
    "compile": True,
}
EXPERTS = ExpertSpec(num_experts=4, top_k=2, expert_ffn_size=1024, first_dense_layers=2)
ANY_LAYOUT = LayoutSpec(
    **dict.fromkeys(("dp_replicate", "dp_shard", "tp", "pp", "zero_stage", "virtual_stages"), "auto")
)


@pytest.mark.parametrize(
    ("changes", "times", "batch"),
    [
        pytest.param({}, 1.0, 6, id="alike"),
        pytest.param({}, 5.0, 14, id="unlike", marks=SLOW),
        pytest.param({"precision": PrecisionSpec(matmul="fp8")}, 2.5, 12, id="8 bits", marks=SLOW),
        pytest.param(
            {"model": replace(SPEC.model, experts=EXPERTS, vocab_size=131_072)}, 3.0, 12, id="experts", marks=SLOW
        ),
        pytest.param(NARROW | {"layout": LayoutSpec(pp=2, dp_shard=1)}, 16.0, 960, id="a head for one pool"),
    ],
)
def test_no_step_is_below_its_bound_and_none_of_the_best_is_pruned(
    changes: dict[str, Any], times: float, batch: int
) -> None:
    """Every layout of four devices, placed in every way."""
    spec = replace(SPEC, batching=BatchingSpec(global_batch_size=batch), recompute="auto", layout=ANY_LAYOUT)
    spec = replace(spec, **changes)
    slow = slower(FAST, times) if times < 16 else replace(FAST, memory_tb_per_s=FAST.memory_tb_per_s / times)
    both = over(PoolSpec(FAST, 1, 2), PoolSpec(slow, 1, 2), spec=spec)
    searches = [PoolSearch(both, describe_pools(both.cluster), efficiency_of(both.cluster)) for _ in range(2)]
    pruned, whole = searches
    bound_s, step_of = pruned.watch.bound_s, pruned.watch.step
    tightness, steps = list[float](), list[float]()

    def count(*given: Any) -> Any:
        steps.append(step_of(*given).time.total_s)
        return step_of(*given)

    def compare(setups: Any, placement: Placement, samples: int) -> float:
        step_s = whole.watch.step(setups, placement, samples).time.total_s
        tightness.append(bound_s(setups, placement, samples) / step_s)
        return 0.0

    whole.watch.bound_s, pruned.watch.step = compare, count  # type: ignore[method-assign]
    found = [[placed.step.time.total_s for placed in search.run(1)] for search in searches]
    assert found[0] == found[1]
    assert len(tightness) > 30 and max(tightness) <= 1 + 1e-12, "a bound is never above a step"
    assert max(tightness) > 0.7, "nor far below all of them"
    assert len(steps) < whole.considered, "most layouts leave before their step is known"


@pytest.mark.slow
@pytest.mark.parametrize("chip", [FAST, slower(FAST, 5.0), replace(FAST, memory_tb_per_s=0.2)])
@pytest.mark.parametrize("matmul", ["compute", "fp8"])
def test_a_sample_takes_hardly_less_in_a_size_between_those_that_the_bound_looks_at(
    chip: AcceleratorSpec, matmul: Any
) -> None:
    spec = replace(SPEC, **NARROW, precision=PrecisionSpec(matmul=matmul), layout=LayoutSpec(dp_shard=1))
    pools = describe_pools(over(PoolSpec(FAST, 1, 2), PoolSpec(chip, 1, 2), spec=spec).cluster)
    watch, eff = Stopwatch(pools, Efficiency()), Efficiency()
    setup = replace(template_of(spec, pools[1].fabric), layout=Layout(dp_replicate=4))
    groups, least_s = axis_groups(setup.layout, pools[1].fabric, eff), math.inf
    for size in range(1, 65):
        for micro_batches in (1, 2, 3, 8, 64):
            sized = replace(setup, micro_batch_size=float(size), grad_accum=micro_batches)
            (rank,) = rank_parts(micro_batch(sized, groups, eff), sized.layout)
            least_s = min(least_s, rank.time_s(sized) / size)
        assert watch._least_sample_s(1, replace(setup, micro_batch_size=float(size)), 64) <= least_s
