"""What a simulation tells of a disturbed run, by hand: figures, exchanges, and the job of a planned candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
from balance.jobs import job_of, parts_of

from trainspec_cli.balance.disturbance import Disturbance, Leave, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.balance.ideal import RankRows
from trainspec_cli.balance.job import describe_job
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.recipe.keys.cluster import AcceleratorSpec, ClusterSpec
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.run import DataSpec, RunSpec, TrainSection
from trainspec_cli.recipe.keys.training import BatchingSpec, OptimSpec, SchedulerSpec


def test_a_simulation_tells_what_was_simulated() -> None:
    job = job_of(16, each=4, replica_groups=2)
    events = {"slow_devices": (SlowDevice(device=3, factor=2, from_step=4, steps=2),)}
    simulation = simulate(job, Disturbance("why", steps=10, noise=0.0, **events), "name")  # type: ignore[arg-type]
    assert (simulation.name, simulation.description, simulation.steps) == ("name", "why", 10)
    assert (simulation.global_batch_size, simulation.data_parallel_ranks, simulation.replica_groups) == (64, 16, 2)
    assert (simulation.micro_batch_size, simulation.largest_micro_batch_size, simulation.report_interval) == (1, 1, 1)
    assert simulation.events == tuple(event.describe() for event in events["slow_devices"])
    assert simulation.step_s == pytest.approx(4.25)


def test_a_pace_is_the_samples_over_the_time_of_all_steps_and_of_each() -> None:
    """Eight undisturbed steps take 4.25 s and two 8.25 s, of 32 samples each; two steps are too few to act."""
    slow = SlowDevice(device=3, factor=2, from_step=4, steps=2)
    simulation = simulate(job_of(8, each=4), Disturbance(steps=10, noise=0.0, slow_devices=(slow,)), "x")
    assert simulation.off.wall_s == pytest.approx(8 * 4.25 + 2 * 8.25)
    assert simulation.off.samples_per_s == pytest.approx(320 / (8 * 4.25 + 2 * 8.25))
    assert simulation.off.by_step == pytest.approx([32 / 4.25] * 3 + [32 / 8.25] * 2 + [32 / 4.25] * 5)
    assert simulation.on == simulation.off
    lost_s = simulation.off.wall_s - simulation.ideal.wall_s
    assert lost_s > 0 and simulation.won_back == 0 == simulation.won_back_of_real
    assert simulation.ideal.by_step[0] == simulation.ideal_real.by_step[0] == simulation.off.by_step[0]


def test_what_is_won_back_is_the_part_of_what_could_be() -> None:
    slow = SlowDevice(device=3, factor=2, from_step=20)
    simulation = simulate(job_of(8), Disturbance(steps=100, noise=0.0, slow_devices=(slow,)), "x")
    off_s, on_s = simulation.off.wall_s, simulation.on.wall_s
    assert simulation.won_back == pytest.approx((off_s - on_s) / (off_s - simulation.ideal.wall_s))
    assert simulation.won_back_of_real == pytest.approx((off_s - on_s) / (off_s - simulation.ideal_real.wall_s))
    assert simulation.won_back_of_real is not None and simulation.won_back is not None
    assert simulation.won_back_of_real <= simulation.won_back


def test_a_change_costs_a_step_of_computing_once() -> None:
    """Samples that were read ahead are read anew: the step of the change takes as much longer as it computes."""
    slow = SlowDevice(device=3, factor=2, from_step=20)
    simulation = simulate(job_of(8), Disturbance(steps=60, noise=0.0, slow_devices=(slow,)), "x")
    decision, *_ = simulation.decisions
    seconds = [256 / pace for pace in simulation.on.by_step]
    assert seconds[decision.step - 2] == pytest.approx(64.25)
    assert seconds[decision.step - 1] - seconds[decision.step] == pytest.approx(decision.expected_s)
    assert (decision.kind, decision.group, decision.micro_batch_size) == ("shares", None, 1)
    assert decision.before_s == pytest.approx(64.0) and decision.achieved_s == pytest.approx(
        seconds[decision.step] - 0.25
    )


def test_a_decision_names_its_replica_group_where_there_are_several() -> None:
    slow = SlowDevice(device=9, factor=2, from_step=20)
    simulation = simulate(job_of(16, replica_groups=2), Disturbance(steps=60, noise=0.0, slow_devices=(slow,)), "x")
    shares = [decision for decision in simulation.decisions if decision.kind == "shares"]
    assert {decision.group for decision in shares} == {1} and "rank 1 " in shares[0].reason


def test_exchanges_of_each_micro_batch_are_in_what_a_decision_expects_and_achieves() -> None:
    parts = parts_of(gradients_each_s=0.5)
    job = job_of(8, parts=parts)
    job = replace(job, layout=replace(job.layout, zero_stage=3), largest_micro_batch=4)
    slow = SlowDevice(device=3, factor=2, from_step=20)
    simulation = simulate(job, Disturbance(steps=60, noise=0.0, slow_devices=(slow,)), "x")
    decision, *_ = simulation.decisions
    assert decision.micro_batches is not None
    assert decision.before_s == pytest.approx(64 + 32 * (0.5 + 0.2 / 32))
    assert decision.achieved_s == pytest.approx(decision.expected_s, rel=0.05)


def test_a_narrow_network_is_won_back_by_no_scheduler_and_no_ideal() -> None:
    link = NarrowLink(factor=3)
    simulation = simulate(job_of(8), Disturbance(steps=5, noise=0.0, narrow_links=(link,)), "x")
    assert simulation.off.wall_s == pytest.approx(5 * (32 + 3 * 0.2 + 0.05))
    assert simulation.ideal.wall_s == pytest.approx(simulation.off.wall_s)


def test_a_group_that_is_away_computes_nothing_and_waits_for_nobody() -> None:
    """Its slow node is away with it: the other group takes all 64 samples, or its half of them where the batch
    shrinks."""
    away = {"leaves": (Leave(node=1),), "slow_nodes": (SlowNode(node=1, factor=9),)}
    for on_loss, seconds in (("keep", 8.25), ("shrink", 4.25)):
        job = job_of(16, each=4, replica_groups=2, on_loss=on_loss)
        simulation = simulate(job, Disturbance(steps=3, noise=0.0, **away), "x")  # type: ignore[arg-type]
        assert simulation.off.wall_s == pytest.approx(3 * seconds)
        assert simulation.off.samples_per_s == pytest.approx((64 if on_loss == "keep" else 32) / seconds)


def test_noise_is_in_what_ranks_measure_and_not_in_what_steps_take() -> None:
    quiet, noisy = (simulate(job_of(8), Disturbance(steps=20, noise=noise), "x") for noise in (0.0, 0.02))
    assert quiet.on == noisy.on


# The job of a planned candidate

CHIP = AcceleratorSpec(
    name="chip", vendor="x", bf16_tflops=900, memory_gb=80, memory_tb_per_s=3.0, link_gb_per_s=450, link_kind="nvlink"
)
SPEC = RunSpec(
    model=DecoderModel(8, 1024, 8, 8, 128, 2816, 32_000),
    data=DataSpec(seq_len=1024, source="text"),
    optim=OptimSpec(lr=1e-3),
    batching=BatchingSpec(global_batch_size=96),
    train=TrainSection(max_steps=10),
    cluster=ClusterSpec(num_nodes=4, devices_per_node=8, accelerator=CHIP),
    layout=LayoutSpec(dp_replicate=4, dp_shard=4, tp=2, zero_stage=1),
    scheduler=SchedulerSpec(change=0.07),
)


def test_the_job_of_a_candidate_is_divided_into_its_replica_groups() -> None:
    spec = replace(SPEC, resilience=ResilienceSpec(mode="elastic", replica_groups=2))
    candidate = plan_capacity(replace(spec, resilience=ResilienceSpec()), None).candidates[0]
    job = describe_job(spec, candidate, None)
    assert (job.layout.dp_replicate, job.layout.dp_shard, job.layout.tp) == (2, 4, 2)
    assert job.groups == (RankRows(slice(0, 8), 8), RankRows(slice(8, 16), 8))
    assert (job.cluster.ranks, job.num_nodes, job.devices_per_node) == (16, 4, 8)
    assert (job.change, job.keeps_micro_batches, job.batching) == (0.07, False, spec.batching)
    assert job.even.counts(48) == (6,) * 8
    assert job.even.micro_batch_size == candidate.micro_batch_size
    assert candidate.micro_batch_size < job.largest_micro_batch <= 2 * candidate.micro_batch_size
    assert [portion.samples for portion in job.portions((1.0, 1.0))] == [48, 48]
    assert [portion.samples for portion in job.portions((2.0, 1.0))] == [64, 32]
    assert [portion.start for portion in job.portions((2.0, 1.0))] == [0, 64]


def test_a_plain_run_is_one_group_and_a_recipe_may_bound_the_micro_batch() -> None:
    candidate = plan_capacity(SPEC, None).candidates[0]
    bounded = replace(SPEC, scheduler=SchedulerSpec(max_micro_batch_size=77))
    job = describe_job(bounded, candidate, None)
    assert job.groups == (RankRows(slice(0, 16), 16),) and job.layout == candidate.layout
    assert job.largest_micro_batch == 77


@pytest.mark.parametrize(
    ("device", "mode", "late_steps"),
    [("cuda", "none", 1), ("auto", "none", 1), ("cpu", "none", 0), ("cuda", "elastic", 0)],
)
def test_a_job_on_accelerators_follows_a_decision_one_step_later(device: str, mode: str, late_steps: int) -> None:
    """Steps of replica groups are recorded before the next one there too, because the groups wait for one another."""
    candidate = plan_capacity(SPEC, None).candidates[0]
    groups = 2 if mode == "elastic" else "auto"
    resilience = ResilienceSpec(mode=mode, replica_groups=groups)  # type: ignore[arg-type]
    cluster = replace(SPEC.cluster, device=device)  # type: ignore[arg-type]
    assert describe_job(replace(SPEC, resilience=resilience, cluster=cluster), candidate, None).late_steps == late_steps


def test_an_undisturbed_step_of_the_job_takes_what_was_planned() -> None:
    candidate = plan_capacity(SPEC, None).candidates[0]
    simulation = simulate(describe_job(SPEC, candidate, None), Disturbance(steps=1), "x")
    assert simulation.step_s == pytest.approx(candidate.step_time_s, rel=0.02)
