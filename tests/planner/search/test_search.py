"""The search is exact, fast, and says why."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import islice

import pytest
from lab.drawing import slow_after

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.capacity import plan_best, plan_capacity, search_of, softwares_of, template_of
from trainspec_cli.planner.hardware.cluster import axis_groups, describe_fabric
from trainspec_cli.planner.hardware.rates import Efficiency, find_accelerator, models
from trainspec_cli.planner.memory.predict import (
    SURELY,
    expected_step_s,
    fit_probability,
    mean_layer_memory,
    memory_limit_bytes,
    peak_of,
)
from trainspec_cli.planner.pipeline import cut, is_open
from trainspec_cli.planner.search.search import ABOUT, Costs, Search, costs_of, recompute_names
from trainspec_cli.planner.search.space import Space
from trainspec_cli.planner.setup import RECOMPUTE, Software, changed
from trainspec_cli.planner.time.step import assemble_step, estimate_step, mean_times, micro_batch, planned_times
from trainspec_cli.planner.workload import adapter_params
from trainspec_cli.recipe.field_types import AUTO
from trainspec_cli.recipe.keys.cluster import ClusterSpec, Machine
from trainspec_cli.recipe.keys.layout import SHARDINGS, Layout, LayoutSpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, LoraSpec, OptimSpec

OPEN = LayoutSpec(AUTO, AUTO, AUTO, AUTO, AUTO, AUTO, AUTO, pipeline_schedule=AUTO, virtual_stages=AUTO)


def run_of(model: str, nodes: int, batch: int = 512, **changes: object) -> RunSpec:
    chip = find_accelerator("H100-SXM-80GB")
    spec = RunSpec(
        model=models()[model],
        data=DataSpec(seq_len=8192, source="tokens"),
        optim=OptimSpec(lr=1e-4),
        batching=BatchingSpec(global_batch_size=batch),
        train=TrainSection(max_steps=10),
        cluster=ClusterSpec(num_nodes=nodes, devices_per_node=8, accelerator=chip, nic_gbit_per_s=400.0),
        layout=OPEN,
        recompute="auto",
        compile=True,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def test_adapters_fit_where_training_every_weight_does_not() -> None:
    """One GPU: fp32 weights are 30 GiB of it; their gradients and moments would be three times that."""
    one = run_of("llama3_8b", nodes=1, batch=4, compile=False, data=DataSpec(seq_len=2048, source="tokens"))
    one = replace(one, cluster=replace(one.cluster, devices_per_node=1))
    adapters = replace(one, lora=LoraSpec(rank=16))
    whole, few = (plan_capacity(spec, None).candidates[0] for spec in (one, adapters))
    assert not whole.fits
    assert few.fits
    assert few.memory[0].optimizer_bytes == pytest.approx(8 * adapter_params(one.model, adapters.lora), rel=0.01)
    assert few.step_time_s < 0.8 * whole.step_time_s, "frozen weights have no gradients to compute"


@pytest.mark.parametrize("pp", [AUTO, 4])
def test_pruning_loses_nothing(pp: int | str) -> None:
    """The best layouts, and the safest, are those that predicting every one of them finds, each with its layers best
    cut."""
    spec, eff = run_of("llama3_8b", nodes=2, batch=64, layout=replace(OPEN, pp=pp)), Efficiency()
    fabric = describe_fabric(spec.cluster, None)
    template, software = template_of(spec, fabric), Software()
    softwares = dict.fromkeys(SHARDINGS, software)
    search = Search(Space(spec, 16, 8), template, softwares, recompute_names("auto"), (False,), eff)
    found = [item.step_time_s for item in islice(search.best(), 5)]
    limit_bytes = memory_limit_bytes(fabric.chip)
    all_of_them = []
    for layout, micro, accum in Space(spec, 16, 8).layouts():
        for name in recompute_names("auto"):
            setup = replace(template, layout=layout, micro_batch_size=float(micro), grad_accum=accum)
            setup = replace(setup, recompute=RECOMPUTE[name], software=software)
            if (peak := peak_of(setup, mean_layer_memory(setup))) <= limit_bytes:
                if is_open(layout, spec.model):
                    once = micro_batch(setup, axis_groups(layout, fabric, eff), eff)
                    setup = replace(setup, layout=cut(planned_times(once, setup), layout))
                step_s, chance = estimate_step(setup, eff).total_s, fit_probability(peak, limit_bytes)
                all_of_them.append((expected_step_s(step_s, chance, 0.0), step_s, min(chance, SURELY)))
                if chance >= SURELY:
                    break
    assert found == pytest.approx([step_s for _, step_s, _ in sorted(all_of_them)[:5]])
    slowest_s = 1.1 * min(all_of_them)[0]
    safest = max((chance, -step_s) for _, step_s, chance in all_of_them if step_s <= slowest_s)
    first = search.safest()[0]
    assert (min(fit_probability(first.peak_bytes, limit_bytes), SURELY), -first.step_time_s) == pytest.approx(safest)


@pytest.mark.parametrize("model", slow_after(1, ["llama3_8b", "mixtral_8x7b", "nemotron_h_8b"]))
@pytest.mark.parametrize("nic_gbit_per_s", slow_after(1, [400.0, 10.0]))
def test_no_step_is_shorter_than_its_bounds(model: str, nic_gbit_per_s: float) -> None:
    """Neither than that of its work alone, nor than that with its exchanges, which is the closer one on a slow
    network."""
    spec, eff = run_of(model, nodes=2, batch=64), Efficiency()
    spec = replace(spec, cluster=replace(spec.cluster, nic_gbit_per_s=nic_gbit_per_s))
    search = search_of(spec, describe_fabric(spec.cluster, None), eff)
    lightest = list(search.bounded())
    heavier = [one for option in lightest if (one := search.heavier(option))]
    options = {(*one.shape, search.recomputes[one.recompute]): one for one in (*lightest, *heavier)}
    assert len(options) == search.considered == 2 * len(lightest)
    steps = {}
    for found in search.best():
        setup = found.setup
        shape = setup.layout, setup.micro_batch_size, setup.grad_accum
        steps[(*shape, found.recompute)] = found.step_time_s
    works = [options[one].bound_s / step_s for one, step_s in steps.items()]
    closer = [search.closer(options[one]).bound_s / step_s for one, step_s in steps.items()]
    assert len(steps) > 100 and max(closer) <= 1
    assert max(closer) > 0.9, "a bound that is far below cuts nothing off"
    assert max(works) > 0.9 or nic_gbit_per_s == 10.0
    tenth = len(steps) // 10
    assert sorted(closer)[tenth] > (2.0 if nic_gbit_per_s == 10.0 else 1.0) * sorted(works)[tenth]


@pytest.mark.parametrize("model", slow_after(1, ["llama3_8b", "mixtral_8x7b"]))
def test_no_micro_batches_take_less_than_the_smallest(model: str) -> None:
    """So that a layout is too large with every size where it is with the smallest one."""
    spec = run_of(model, nodes=2, batch=48)
    search = replace(search_of(spec, describe_fabric(spec.cluster, None), Efficiency()), slack=math.inf)
    lightest = list(search.bounded())
    sizes = 0
    for option in (*lightest, *(one for each in lightest if (one := search.heavier(each)))):
        sizes += option.micro_batch_size > 1
        assert search.peak(option)[1] >= search.least_bytes(option)
    assert sizes > len(lightest) / 2


@pytest.mark.slow
def test_the_best_alone_is_the_best_of_the_plan() -> None:
    for changes in ({}, {"resilience": ResilienceSpec(mode="elastic")}):
        spec = run_of("llama3_8b", nodes=4, batch=256, **changes)
        best = plan_best(spec)
        assert best is not None and best == plan_capacity(spec).best
    assert plan_best(run_of("llama3_405b", nodes=1)) is None


def test_the_first_choice_is_not_one_that_barely_fits() -> None:
    """A layout that is a percent faster, and fits at nine in ten, comes after one that surely fits."""
    cluster = run_of("llama3_70b", nodes=32).cluster
    assert cluster.accelerator is not None
    cluster = replace(cluster, accelerator=replace(cluster.accelerator, memory_gb=77.0))
    steps = TrainSection(max_steps=100_000)
    plan = plan_capacity(run_of("llama3_70b", nodes=32, batch=1024, train=steps, cluster=cluster))
    assert plan.best is not None and plan.best.fit_probability > 0.999
    assert plan.safest == plan.best
    pinned = {"layout": LayoutSpec(1, 16, 1, 4, 4, zero_stage=1, pipeline_schedule="1f1b"), "recompute": "selective"}
    alone = plan_capacity(run_of("llama3_70b", nodes=32, **pinned, batching=BatchingSpec(1024, 1), cluster=cluster))
    tight = alone.candidates[0]
    assert tight.fits and tight.fit_probability < 0.97 and tight.step_time_s < plan.best.step_time_s
    assert tight.expected_step_s > tight.step_time_s


def test_the_safest_that_is_about_as_fast_stands_beside_the_best() -> None:
    """One node has no room for 8B but for layouts that barely fit and those that recompute."""
    plan = plan_capacity(run_of("llama3_8b", nodes=1, batch=64, train=TrainSection(max_steps=10**6)))
    assert plan.best is not None and plan.safest is not None
    assert plan.safest.fit_probability >= min(SURELY, max(one.fit_probability for one in plan.candidates))
    assert plan.safest.step_time_s <= 1.1 * plan.best.step_time_s
    assert plan_capacity(run_of("llama3_405b", nodes=1)).safest is None


def test_a_short_run_prefers_what_surely_fits() -> None:
    """A start in vain costs minutes: nothing over weeks, and much over ten steps."""
    long, short = (
        plan_capacity(run_of("llama3_8b", nodes=1, batch=64, train=TrainSection(max_steps=steps))).best
        for steps in (10**6, 10)
    )
    assert long and short and short.fit_probability >= long.fit_probability
    assert short.expected_step_s - short.step_time_s <= 30 * (1 - short.fit_probability) + short.step_time_s / 3


def test_every_layout_is_accounted_for() -> None:
    plan = plan_capacity(run_of("llama3_8b", nodes=2))
    counted = plan.rejected["memory"] + plan.rejected["slower than those shown"] + len(plan.candidates)
    assert counted == plan.considered


def test_candidates_fit_and_are_sorted_and_their_parts_sum_to_the_step() -> None:
    plan = plan_capacity(run_of("mixtral_8x7b", nodes=2))
    times = [candidate.expected_step_s for candidate in plan.candidates]
    assert plan.best is not None and times[1:] == sorted(times[1:])
    assert times[0] <= ABOUT * min(times)
    for candidate in plan.candidates:
        assert candidate.fits and candidate.layout.world_size == 16
        assert candidate.time.total_s == pytest.approx(candidate.step_time_s)
        assert max(stage.total_bytes for stage in candidate.memory) == candidate.peak_memory_bytes
        assert 0.05 < candidate.mfu <= candidate.hfu < 0.9


def test_where_nothing_fits_the_smallest_is_shown() -> None:
    plan = plan_capacity(run_of("llama3_405b", nodes=1, batch=64))
    assert plan.best is None and plan.candidates[0].peak_memory_bytes > plan.candidates[0].memory_limit_bytes
    assert plan.candidates[0].fit_probability < 1e-9
    assert plan.rejected["memory"] == plan.considered


@pytest.mark.slow
def test_large_clusters_need_few_evaluations() -> None:
    """405B on 16,384 GPUs: the space stays small enough for two seconds of one core."""
    plan = plan_capacity(run_of("llama3_405b", nodes=2048, batch=2048))
    assert plan.best is not None
    assert plan.considered < 20_000


def test_a_cpu_without_description_gets_a_rough_one() -> None:
    spec = replace(run_of("llama_6m", nodes=1, batch=32), cluster=ClusterSpec(devices_per_node=2, device="cpu"))
    machine = Machine("host", cpu_cores=2, memory_bytes=8 * 2**30, bf16=True)
    plan = plan_capacity(spec, machine)
    assert plan.best is not None and any("CPU" in line for line in plan.assumptions)


def test_a_chip_without_rates_is_refused_by_key() -> None:
    spec = run_of("llama3_8b", nodes=1)
    chip = replace(spec.cluster.accelerator, memory_tb_per_s=0.0)  # type: ignore[type-var]
    with pytest.raises(RecipeError, match="memory_tb_per_s"):
        plan_capacity(replace(spec, cluster=replace(spec.cluster, accelerator=chip)))


def test_corrections_change_the_plan_and_unknown_ones_are_refused() -> None:
    spec = run_of("llama3_8b", nodes=1)
    slower = replace(spec, cluster=replace(spec.cluster, efficiency={"matmul": 0.5}))
    assert plan_capacity(slower).candidates[0].step_time_s > 1.2 * plan_capacity(spec).candidates[0].step_time_s
    with pytest.raises(RecipeError, match="warp"):
        plan_capacity(replace(spec, cluster=replace(spec.cluster, efficiency={"warp": 9.0})))


# What searches compute once is what each layout would be given by itself


EFF = Efficiency()


def test_a_step_of_shared_parts_is_that_of_the_layout_alone() -> None:
    spec = run_of("mixtral_8x7b", nodes=2, batch=64)
    template = template_of(spec, describe_fabric(spec.cluster, None))
    costs = costs_of(template, tuple(softwares_of(spec).items()), EFF)
    for layout, micro, accum in list(Space(spec, 16, 8).layouts())[::7]:
        setup = costs.setup(layout, micro, accum, "full")
        groups = axis_groups(layout, setup.fabric, EFF)
        once = micro_batch(setup, groups, EFF)
        whole = replace(setup, layout=cut(mean_times(once, setup), layout)) if is_open(layout, spec.model) else setup
        assert costs.steps.step_s(setup) == assemble_step(whole, once, groups, EFF).total_s


def test_searches_that_differ_in_what_they_may_choose_share_the_costs() -> None:
    spec = run_of("llama3_8b", nodes=2, batch=64)
    fabric = describe_fabric(spec.cluster, None)
    one, other = (costs_of(template_of(spec, fabric), tuple(softwares_of(spec).items()), EFF) for _ in range(2))
    eight = replace(spec, precision=replace(spec.precision, matmul="fp8"))
    assert one is other
    assert costs_of(template_of(eight, fabric), tuple(softwares_of(eight).items()), EFF) is not one


def test_searches_that_differ_in_replica_groups_share_all_but_the_exchanges() -> None:
    """Groups exchange once more, over their own ranks."""
    spec = run_of("llama3_8b", nodes=2, batch=64)
    fabric = describe_fabric(spec.cluster, None)
    softwares = tuple(softwares_of(spec).items())
    plain = template_of(spec, fabric)
    grouped = replace(plain, replica_groups=2)
    one, two = (costs_of(template, softwares, EFF) for template in (plain, grouped))
    layout = Layout(dp_replicate=16, dp_shard=1)
    assert one.works_s(layout, 1, 1) is two.works_s(layout, 1, 1)
    assert one.least_exchange_s(layout, 1, 1, "none") != two.least_exchange_s(layout, 1, 1, "none")
    alone = Costs(grouped, dict(softwares), EFF)
    assert two.least_exchange_s(layout, 1, 1, "none") == alone.least_exchange_s(layout, 1, 1, "none")
    assert two.steps.step_s(two.setup(layout, 1, 1)) == alone.steps.step_s(alone.setup(layout, 1, 1))


def test_a_record_is_changed_as_replace_does() -> None:
    spec = run_of("llama3_8b", nodes=2, batch=64)
    setup = template_of(spec, describe_fabric(spec.cluster, None))
    assert changed(setup, grad_accum=3, layout=Layout(tp=2)) == replace(setup, grad_accum=3, layout=Layout(tp=2))
    assert changed(setup.layout, pp=4) == replace(setup.layout, pp=4)
    assert hash(changed(setup, grad_accum=3)) == hash(replace(setup, grad_accum=3))
    assert setup.grad_accum == 1
