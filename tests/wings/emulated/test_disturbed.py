"""What disturbances and faults cost at rehearsed step times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from wings.emulated.test_planned import planned, rehearsed

from trainspec_cli.balance.disturbance import Disturbance
from trainspec_cli.balance.live import Situations
from trainspec_cli.core.errors import RecipeError
from trainspec_cli.planner.run import forecast
from trainspec_cli.recipe.keys.training import Fault, parse_faults
from trainspec_cli.recipe.rules.check import check_engine
from trainspec_cli.wings.emulated.disturbed import add_costs, check_faults, cost_of, describe, rehearsed_job
from trainspec_cli.wings.emulated.planned import PlanToRehearse, Rehearsal, time_step
from trainspec_cli.wings.emulated.rehearsal import FaultCost

CHECKPOINT_BYTES = 1e12


@cache
def done() -> Rehearsal:
    """Steps of a pipeline whose last stage is the slowest."""
    one = planned()
    ranks = [rehearsed(one, rank, 1.5 if rank == 3 else 1.0, rest_s=2.0) for rank in (0, 1, 3)]
    step = time_step(one, ranks)
    return Rehearsal(*("", 32, 1, 16, "full", 1, "", 0.0, 0.0, 0.0, ()), step=step, checkpoint_bytes=CHECKPOINT_BYTES)


def cost(fault: str, one: PlanToRehearse | None = None) -> FaultCost:
    one = one or planned()
    (parsed,) = parse_faults(fault)
    one = replace(one, spec=replace(one.spec, fault=fault))
    assert check_faults(one, [0, 8, 24], disturbed=False) == (parsed,)
    step = done().step
    assert step is not None
    return cost_of(parsed, one, done(), step)


def test_an_undisturbed_step_is_the_rehearsed_one() -> None:
    step = done().step
    assert step is not None
    job = rehearsed_job(planned(), step)
    assert Situations(job, Disturbance()).at(1).even_s == pytest.approx(step.step_s)
    assert job.cluster.parts.rest_s + job.cluster.parts.optimizer_s == pytest.approx(2.0), "the optimizer"
    passes_s = [stage.compute.time_s(1, 1) for stage in job.cluster.parts.stages]
    assert passes_s == pytest.approx([3.0, 3.0, 3.0, 4.5])


def test_a_disturbance_is_simulated_with_rehearsed_steps() -> None:
    """A device of the first stage at half speed: its stage takes 6 s for each micro-batch, and the slowest one 4.5."""
    found = cost("slow(step=10,rank=0,seconds=48,steps=20)")
    assert found.wall_s is not None
    # Each micro-batch takes 1.5 s more, and so does the bubble, now with the stage of 4.5 s. The update is slow, too.
    step = done().step
    assert step is not None
    update_s = rehearsed_job(planned(), step).cluster.parts.optimizer_s
    assert found.wall_s == pytest.approx(20 * (16 * 1.5 + 1.5 + update_s))
    assert cost("slow(step=10,rank=0,seconds=1,steps=20)").wall_s == pytest.approx(20 * 1 / 16, rel=0.2)
    assert add_costs(planned(), replace(done(), step=None), None, parse_faults("kill(step=1)")).faults == ()


def test_a_killed_rank_restarts_the_run_from_its_checkpoint() -> None:
    one = planned()
    cluster = one.spec.cluster
    reliability = cluster.reliability
    load_s = CHECKPOINT_BYTES / (cluster.num_nodes * cluster.storage_gb_per_s * 1e9)
    found = cost("kill(step=1000,rank=3)")
    assert found.wall_s is not None
    assert found.pause_s == pytest.approx(reliability.detect_s + reliability.start_s + load_s)
    step = done().step
    assert step is not None
    assert found.wall_s == pytest.approx(found.pause_s + found.lost_steps * step.step_s, rel=0.01)
    assert found.device_hours == pytest.approx(found.wall_s * 32 / 3600)
    assert found.usd == pytest.approx(found.device_hours * forecast.rental_price(cluster))
    spared = replace(one.spec, cluster=replace(cluster, reliability=replace(reliability, spare_nodes=1)))
    lost = cost("lose_node(step=1000,rank=3)", replace(one, spec=spared))
    assert lost.pause_s == pytest.approx(found.pause_s + reliability.swap_s)
    assert lost.lost_steps == found.lost_steps
    # Without a spare, the run continues on fewer nodes until the node is repaired.
    fewer = cost("lose_node(step=1000,rank=3)")
    assert (fewer.pause_s, fewer.lost_steps) == (found.pause_s, found.lost_steps)
    assert fewer.parts_s["shrunk"] > 0
    # A hang is noticed after five slow steps.
    hung = cost("hang(step=1000,rank=3)")
    assert hung.pause_s - found.pause_s == pytest.approx(5 * step.step_s - reliability.detect_s)


def test_more_steps_are_lost_the_longer_the_last_checkpoint_is_ago() -> None:
    one = planned()
    checkpoint = replace(one.spec.checkpoint, interval_steps=100)
    one = replace(one, spec=replace(one.spec, checkpoint=checkpoint))
    assert cost("kill(step=1010)", one).lost_steps == pytest.approx(11, abs=0.1)
    assert cost("kill(step=1090)", one).lost_steps == pytest.approx(91, abs=0.1)
    ended = replace(one, spec=replace(one.spec, resilience=replace(one.spec.resilience, mode="none")))
    found = cost("kill(step=1010)", ended)
    assert found.wall_s is None
    assert found.lost_steps == pytest.approx(11, abs=0.1)


def test_a_lost_link_costs_a_dip_with_planes_and_a_node_without() -> None:
    assert cost("lose_link(step=1000,rank=3)").pause_s == cost("lose_node(step=1000,rank=3)").pause_s
    meshed = planned(fabric="mrc_8x100g")
    one = cost("lose_link(step=1000,rank=3,seconds=600)", meshed)
    every = cost("lose_plane(step=1000,seconds=600)", meshed)
    assert one.pause_s == every.pause_s == 0
    assert one.wall_s is not None
    assert every.wall_s is not None
    assert 0 <= one.wall_s <= every.wall_s


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("bitflip(step=4)", "unsupported"),
        ("lose_plane(step=4)", "unsupported"),
        ("kill(step=4,rank=32)", "out_of_range"),
        ("kill(step=100000000)", "out_of_range"),
        ("slow(step=4,steps=0)", "out_of_range"),
    ],
)
def test_what_a_rehearsal_cannot_cost_is_refused(fault: str, code: str) -> None:
    with pytest.raises(RecipeError) as error:
        cost(fault)
    assert [problem.code for problem in error.value.problems] == [code]


def test_costs_need_each_kind_of_stage() -> None:
    for disturbed, fault in ((True, ""), (False, "kill(step=4)")):
        one = replace(planned(), spec=replace(planned().spec, fault=fault))
        with pytest.raises(RecipeError):
            check_faults(one, [0, 24], disturbed=disturbed)
    assert check_faults(planned(), [0], disturbed=False) == ()


def test_a_run_does_not_inject_what_only_a_rehearsal_knows() -> None:
    spec = replace(planned().spec, fault="lose_node(step=4)")
    assert ("unsupported", "fault") in [(problem.code, problem.path) for problem in check_engine(spec)]
    assert check_engine(replace(spec, fault="nonsense")) == check_engine(replace(spec, fault=""))  # `check` reports it
    assert describe(Fault("slow", 60, rank=3, seconds=0.5)) == "slow(step=60,rank=3,seconds=0.5)"
