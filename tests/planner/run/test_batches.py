"""The steps of a run whose batch changes, against plans of each size alone and against one step after another."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from trainspec_cli.balance.batch.batch import schedule_batches, step_batch
from trainspec_cli.planner.capacity import PREDICTED_SIZES, as_plan, main_size, plan_capacity
from trainspec_cli.planner.run.forecast import expect_work, forecast_run
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, BatchScheduleSpec, OptimSpec, RampStage
from trainspec_cli.recipe.results.plan import Candidate, SizedStep, StepTime

CHIP = AcceleratorSpec("chip", "maker", 500.0, 80.0, 3.0, link_gb_per_s=300.0, link_kind="nvswitch", tdp_w=500)
SEESAW = BatchScheduleSpec(kind="seesaw", growth=2.0)
CONSTANT = BatchScheduleSpec()


def make_spec(schedule: BatchScheduleSpec, size: int = 32, layout: LayoutSpec | None = None) -> RunSpec:
    return RunSpec(
        model=DecoderModel(4, 1024, 8, 8, 128, 4096, 8192),
        data=DataSpec(seq_len=2048, source="tokens"),
        optim=OptimSpec(lr=1e-4),
        batching=BatchingSpec(global_batch_size=size, micro_batch_size=2, schedule=schedule),
        train=TrainSection(max_steps=5000),
        cluster=ClusterSpec(num_nodes=2, devices_per_node=4, accelerator=CHIP, nic_gbit_per_s=400.0),
        layout=layout or LayoutSpec(dp_shard=8, dp_replicate=1),
    )


def best(spec: RunSpec) -> Candidate:
    found = plan_capacity(spec).best
    assert found is not None
    return found


def test_each_size_is_predicted_as_a_run_of_that_size_alone() -> None:
    sized = best(make_spec(SEESAW)).sized_steps
    assert [step.samples for step in sized] == [32, 64, 128, 256]
    for step in sized:
        assert step.time == best(make_spec(CONSTANT, step.samples)).time


def test_micro_batches_that_are_not_full_count_as_whole_ones() -> None:
    ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 40),))
    _, larger = best(make_spec(ramp)).sized_steps
    assert larger.time == best(make_spec(CONSTANT, 48)).time


def test_an_interleaved_pipeline_takes_micro_batches_in_turns() -> None:
    pipeline = LayoutSpec(dp_shard=4, dp_replicate=1, pp=2, pipeline_schedule="interleaved", virtual_stages=2)
    ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 36),))
    _, larger = best(make_spec(ramp, layout=pipeline)).sized_steps
    assert larger.time == best(make_spec(CONSTANT, 48, pipeline)).time


@pytest.mark.parametrize("schedule", [CONSTANT, BatchScheduleSpec(kind="noise", max_global_batch_size=256)])
def test_where_no_other_size_is_known_nothing_else_is_predicted(schedule: BatchScheduleSpec) -> None:
    spec = make_spec(schedule)
    candidate = best(spec)
    work = expect_work(spec, candidate)
    assert (candidate.sized_steps, work.batches) == ((), ())
    assert (work.steps, work.step_time_s, work.time) == (5000, candidate.step_time_s, candidate.time)


def test_of_many_sizes_some_are_predicted_and_the_others_lie_between() -> None:
    spec = make_spec(replace(SEESAW, growth=1.05))
    candidate = best(spec)
    work = expect_work(spec, candidate)
    assert len(candidate.sized_steps) == PREDICTED_SIZES
    assert len(work.batches) > 2 * PREDICTED_SIZES
    assert all(a.step_time_s < b.step_time_s for a, b in pairwise(work.batches[:-1]))
    by_size = {batch.step_samples: batch.step_time_s for batch in work.batches}
    assert all(by_size[step.samples] == pytest.approx(step.time.total_s) for step in candidate.sized_steps)


def test_the_work_is_that_of_the_steps_one_after_the_other() -> None:
    """With steps of 0.5 s and 0.01 s a sample, predicted at three sizes alone."""
    spec = make_spec(replace(SEESAW, growth=1.2))
    sizes = spec.batching.sizes_up_to(320)
    sized = tuple(SizedStep(size, StepTime(0.01 * size, dp_comm_s=0.5)) for size in (32, 144, max(sizes) + 50))
    candidate = replace(best(make_spec(CONSTANT)), sized_steps=sized)
    work, schedule = expect_work(spec, candidate), schedule_batches(spec)
    taken: list[int] = []
    while sum(taken) < schedule.run_samples:
        taken.append(step_batch(schedule, sum(taken)).samples)
    assert work.steps == len(taken)
    assert work.time.dp_comm_s == pytest.approx(0.5)
    last_as_the_others = taken[-2] - taken[-1]
    assert work.work_s == pytest.approx(0.5 * len(taken) + 0.01 * (sum(taken) + last_as_the_others))


def test_layouts_are_ranked_for_the_size_that_trains_most_samples() -> None:
    """Of a ramp to 16 times the batch: those of that batch alone, as far as the first size divides over them."""
    long_ramp = BatchScheduleSpec(kind="ramp", stages=(RampStage(10**6, 512),))
    free = LayoutSpec(dp_replicate=1, pp="auto", tp="auto")
    growing, constant = make_spec(long_ramp, layout=free), make_spec(CONSTANT, 512, layout=free)
    plans = [plan_capacity(spec) for spec in (growing, constant)]
    layouts = [[candidate.layout for candidate in plan.candidates] for plan in plans]
    of_the_first = [candidate.layout for candidate in plan_capacity(make_spec(CONSTANT, layout=free)).candidates]
    assert layouts[0] == layouts[1] != of_the_first
    first, same = plans[0].candidates[0], plans[1].candidates[0]
    assert (first.step_time_s, first.tokens_per_s, first.mfu) == (same.step_time_s, same.tokens_per_s, same.mfu)
    assert "layouts are ranked by steps of 512 samples, which train most of the run" in plans[0].assumptions
    assert as_plan(growing, first, plans[0], "bf16").grad_accum_steps == same.grad_accum_steps // 16


def test_a_forecast_is_of_the_steps_that_the_run_makes() -> None:
    constant, seesaw = make_spec(CONSTANT), make_spec(SEESAW)
    runs = [forecast_run(spec, plan_capacity(spec), best(spec)) for spec in (constant, seesaw)]
    assert [run.tokens for run in runs] == [5000 * 32 * 2048] * 2
    assert runs[0].steps == 5000
    assert runs[0].batches == ()
    assert runs[1].steps == sum(batch.steps for batch in runs[1].batches) < 0.7 * 5000
    work_s = sum(batch.steps * batch.step_time_s for batch in runs[1].batches)
    goodput = runs[1].goodput.goodput.value
    assert runs[1].wall_time_s.value == pytest.approx(work_s / goodput)
    assert runs[1].goodput.wall_time_s == pytest.approx(work_s / goodput)
    assert runs[1].wall_time_s.value < runs[0].wall_time_s.value
    assert runs[1].energy_joules is not None
    assert runs[0].energy_joules is not None
    assert runs[1].energy_joules.value < runs[0].energy_joules.value
    step_time_s = next(one for one in runs[1].assumptions if one.key == "step_time_s")
    assert step_time_s.value == pytest.approx(work_s / runs[1].steps)


def test_a_device_that_waits_in_large_steps_takes_less_energy() -> None:
    spec = make_spec(SEESAW)
    candidate = best(spec)
    busy = (SizedStep(32, StepTime(matmul_s=1.0)), SizedStep(256, StepTime(matmul_s=8.0)))
    waiting = (SizedStep(32, StepTime(matmul_s=1.0)), SizedStep(256, StepTime(matmul_s=1.0, bubble_s=7.0)))
    energies = [
        forecast_run(spec, plan_capacity(spec), replace(candidate, sized_steps=steps)).energy_joules
        for steps in (busy, waiting)
    ]
    assert energies[0] is not None
    assert energies[1] is not None
    assert energies[1].value < energies[0].value


def test_the_main_size_trains_most_samples_however_large_others_are() -> None:
    tokens = 32 * 5000 * 2048
    stages = (RampStage(tokens // 10, 64), RampStage(tokens - tokens // 10, 512))
    assert main_size(make_spec(BatchScheduleSpec(kind="ramp", stages=stages))) == 64
    assert main_size(make_spec(CONSTANT)) == 32


def test_a_batch_that_follows_the_noise_is_forecast_as_the_first_and_says_so() -> None:
    spec = make_spec(BatchScheduleSpec(kind="noise", max_global_batch_size=256))
    run = forecast_run(spec, plan_capacity(spec), best(spec))
    assert run.steps == 5000
    assert any("counts on 32 samples a step throughout, and up to 256 make fewer" in note for note in run.notes)
