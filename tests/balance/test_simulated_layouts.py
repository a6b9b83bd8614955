"""Disturbed runs in simulation that move layers between stages, or change to another layout."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
from balance.test_simulation_figures import SPEC

from trainspec_cli.balance.disturbance import Disturbance, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.balance.job import DisturbedJob, describe_job
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.planner.capacity import plan_capacity
from trainspec_cli.recipe.keys.layout import LayoutSpec
from trainspec_cli.recipe.keys.model import DecoderModel
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.keys.training import BatchingSpec, Changeable, SchedulerSpec
from trainspec_cli.recipe.results.forecast import Simulation

MODEL = DecoderModel(32, 2048, 16, 16, 128, 5632, 32_000)
PIPELINE = LayoutSpec(dp_shard=1, pp=8, zero_stage=1)
PIPELINES = LayoutSpec(dp_shard=4, pp=8, zero_stage=1)
TENSOR = LayoutSpec(dp_shard=4, tp=8, zero_stage=1)
SLOW = SlowDevice(device=3, factor=3, from_step=50, steps=400)


@lru_cache
def job_of(layout: LayoutSpec, *may_change: Changeable) -> DisturbedJob:
    """32 devices, or one node of 8 for one pipeline."""
    nodes = 1 if layout == PIPELINE else 4
    spec = replace(
        SPEC,
        compile=True,
        layout=layout,
        model=MODEL,
        batching=BatchingSpec(global_batch_size=64 * nodes),
        cluster=replace(SPEC.cluster, num_nodes=nodes),
        scheduler=SchedulerSpec(may_change=may_change or ("shares", "layers", "layout", "nodes")),
    )
    return describe_job(spec, plan_capacity(spec, None).candidates[0], None)


def run(job: DisturbedJob, **what: object) -> Simulation:
    values = {"steps": 320, "slow_devices": (SLOW,)} | what
    return simulate(job, Disturbance(**values), "test")  # type: ignore[arg-type]


def kinds(simulation: Simulation) -> list[str]:
    return [decision.kind for decision in simulation.decisions]


def test_a_slow_rank_of_the_only_pipeline_hands_layers_on() -> None:
    """There is no other data-parallel rank that could take samples over. The stages' cut is uneven as it is, for the
    head's sake: two layers more elsewhere slow nobody, and nothing has to go back."""
    simulation = run(job_of(PIPELINE, "shares", "layers"))
    (change,) = simulation.decisions
    assert change.kind == "layers" and 50 < change.step < 100
    assert "pipeline rank 3 takes 3 times " in change.reason
    assert change.achieved_s == pytest.approx(change.expected_s, rel=0.1) and change.expected_s < 0.8 * change.before_s
    assert simulation.on.by_step[300] > 0.97 * simulation.on.by_step[20]
    assert simulation.won_back is not None and simulation.won_back >= 0.85


def test_moved_layers_win_more_than_shares_alone() -> None:
    shares, layers = (run(job_of(PIPELINES, *may)) for may in (("shares",), ("shares", "layers")))
    assert set(kinds(shares)) == {"shares"} and "layers" in kinds(layers)
    assert layers.on.wall_s < shares.on.wall_s < shares.off.wall_s
    assert layers.on.by_step[300] > 1.03 * shares.on.by_step[300]


@pytest.mark.slow
def test_a_slow_device_of_a_tensor_parallel_group_leads_to_another_layout() -> None:
    simulation = run(job_of(TENSOR))
    (change,) = [decision for decision in simulation.decisions if decision.kind == "layout"]
    assert "rank 3 " in change.reason and change.expected_s < 0.9 * change.before_s
    settled_s = 256 / simulation.on.by_step[300]
    assert settled_s == pytest.approx(change.expected_s, rel=0.1)
    alone = run(job_of(TENSOR, "shares"))
    assert simulation.on.wall_s < alone.on.wall_s


@pytest.mark.slow
def test_a_change_of_layout_pauses_the_run_for_two_steps_and_the_bytes_that_move() -> None:
    job = job_of(TENSOR, "layout")
    simulation = run(job, steps=120, noise=0.0)
    step = next(decision.step for decision in simulation.decisions if decision.kind == "layout")
    before_s, at_s, after_s = (256 / simulation.on.by_step[step + place] for place in (-2, -1, 0))
    assert at_s - after_s > 2 * before_s
    assert at_s - after_s < 2 * before_s + 1.0, "a rank gets some hundred megabytes over a fast network"


@pytest.mark.slow
def test_a_node_whose_links_are_narrow_leads_to_a_layout_that_exchanges_less_over_them() -> None:
    """Longer steps ask for samples of the links, three of which confirm that they are slower."""
    narrow = NarrowLink(node=1, tier="scaleup", factor=20, from_step=120, steps=150)
    simulation = run(job_of(TENSOR), steps=300, slow_devices=(), narrow_links=(narrow,))
    (change,) = simulation.decisions
    assert change.kind == "layout" and 120 + 6 < change.step <= 120 + 20
    assert change.reason.startswith("the exchanges of rank 8 inside its scale-up domain take 20 times as long as usual")
    assert change.achieved_s < change.expected_s < 0.9 * change.before_s
    assert simulation.won_back is not None and simulation.won_back >= 0.85
    kept = run(job_of(TENSOR, "shares"), steps=300, slow_devices=(), narrow_links=(narrow,))
    assert kept.decisions == (), "it computes as fast as usual, so that no share changes"


@pytest.mark.slow
def test_two_disturbances_of_which_one_leaves_settle() -> None:
    """No layer or layout is changed to and fro."""
    lasting = SlowNode(node=1, factor=1.5, from_step=100)
    leaving = SlowDevice(device=3, factor=2, from_step=50, steps=100)
    for layout in (PIPELINES, TENSOR):
        simulation = run(job_of(layout), steps=300, slow_devices=(leaving,), slow_nodes=(lasting,))
        changes = [decision for decision in simulation.decisions if decision.kind in ("layers", "layout")]
        assert len(changes) <= 3 and len(simulation.decisions) <= 9
        assert all(decision.step < 240 for decision in changes)


@pytest.mark.parametrize("layout", [PIPELINE, PIPELINES, TENSOR])
def test_a_healthy_run_keeps_its_layout(layout: LayoutSpec) -> None:
    simulation = run(job_of(layout), steps=200, slow_devices=())
    assert simulation.decisions == () and simulation.won_back is None


@pytest.mark.slow
def test_the_same_seed_gives_the_same_changes() -> None:
    first, second = (run(job_of(TENSOR), steps=120, seed=4) for _ in range(2))
    assert first == second and "layout" in kinds(first)


def test_replica_groups_have_no_other_layouts() -> None:
    spec = replace(SPEC, resilience=ResilienceSpec(mode="elastic", replica_groups=2))
    candidate = plan_capacity(replace(spec, resilience=ResilienceSpec()), None).candidates[0]
    assert describe_job(spec, candidate, None).layouts is None
