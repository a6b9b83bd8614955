"""Disturbed runs in simulation: what the live decisions win back, and when they leave all as it is."""

from dataclasses import replace

import pytest
from balance.jobs import job_of
from lab.drawing import slow_after

from trainspec_cli.balance.disturbance import Disturbance, Leave, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.recipe.results.forecast import Simulation

SLOW = SlowDevice(device=3, factor=2, from_step=50, steps=150)
SLOW_NODE = SlowNode(node=0, factor=1.5, from_step=50, steps=150)


def run(job: DisturbedJob, **what: object) -> Simulation:
    return simulate(job, Disturbance(**what), "test")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "job",
    slow_after(
        1, [job_of(64), job_of(256, each=64), job_of(32, pp=2), job_of(32, each=64, tp=2), job_of(64, zero_stage=3)]
    ),
)
@pytest.mark.parametrize("events", [{"slow_devices": (SLOW,)}, {"slow_nodes": (SLOW_NODE,)}])
def test_most_of_what_whole_samples_allow_is_won_back(job: DisturbedJob, events: dict[str, object]) -> None:
    simulation = run(job, **events)
    assert simulation.won_back is not None and simulation.won_back >= 0.85
    assert simulation.off.wall_s > simulation.on.wall_s > simulation.ideal.wall_s >= simulation.ideal_real.wall_s


def test_it_acts_within_three_steps_of_the_confirmed_change_and_goes_back() -> None:
    """Two steps of a minute confirm a change; the step after them is the first whose exchange knows of it."""
    first, *_, last = run(job_of(64), slow_devices=(SLOW,)).decisions
    assert 50 + 2 < first.step <= 50 + 6 and "rank 3" in first.reason
    assert last.step > 200 and last.reason.startswith("all ranks")
    assert last.achieved_s == pytest.approx(32 * 1.0, rel=0.01)


@pytest.mark.slow
def test_fail_slows_of_some_minutes_are_won_back_where_a_change_costs_little() -> None:
    """Steps of half a minute: what is plain is believed after two of them, and acted on in the next but one."""
    events = tuple(
        SlowDevice(device=device, factor=factor, from_step=first, steps=40)
        for device, factor, first in ((3, 1.34, 30), (11, 1.5, 90), (3, 1.3, 150), (40, 1.4, 220))
    )
    dear, cheap = (run(job_of(64, change_s=change_s), slow_devices=events) for change_s in (1e3, 1.0))
    assert cheap.won_back is not None and dear.won_back is not None
    assert cheap.won_back >= 0.85 > dear.won_back
    begun = [next(one.step for one in cheap.decisions if one.step >= event.from_step) for event in events]
    assert all(event.from_step + 2 < step <= event.from_step + 5 for event, step in zip(events, begun, strict=True))


@pytest.mark.parametrize("events", slow_after(1, [{"slow_devices": (SLOW,)}, {"slow_nodes": (SLOW_NODE,)}]))
def test_on_an_accelerator_changes_apply_one_step_later(events: dict[str, object]) -> None:
    host, chip = (run(replace(job_of(64), late_steps=late), noise=0.0, **events).decisions for late in (0, 1))
    assert chip[0].step == host[0].step + 1
    assert [one.expected_s for one in chip] == [one.expected_s for one in host]


def test_what_a_decision_achieves_is_near_what_was_expected() -> None:
    first = run(job_of(64), slow_devices=(SLOW,)).decisions[0]
    assert first.before_s == pytest.approx(64, rel=0.05)
    assert first.achieved_s == pytest.approx(first.expected_s, rel=0.15)


@pytest.mark.slow
def test_two_disturbances_of_which_one_leaves_settle() -> None:
    lasting = SlowNode(node=1, factor=1.5, from_step=100)
    leaving = SlowDevice(device=3, factor=2, from_step=50, steps=100)
    simulation = run(job_of(64), slow_devices=(leaving,), slow_nodes=(lasting,))
    steps = [decision.step for decision in simulation.decisions]
    assert 2 <= len(steps) <= 6 and max(steps) < 250
    assert simulation.on.by_step[-1] >= 0.97 * simulation.ideal.by_step[-1]


@pytest.mark.parametrize("job", slow_after(1, [job_of(8), job_of(256, each=128), job_of(8, pp=4)]))
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_healthy_run_is_left_alone(job: DisturbedJob, noise: float) -> None:
    simulation = run(job, steps=1000 if job.cluster.ranks == 8 else 200, noise=noise)
    assert simulation.decisions == () and simulation.won_back is None
    assert simulation.on == simulation.off


def test_what_a_narrow_network_costs_no_shares_win_back() -> None:
    simulation = run(job_of(64), narrow_links=(NarrowLink(node=0, factor=4, from_step=50),))
    assert simulation.decisions == () and simulation.won_back is None
    assert simulation.off.wall_s > 300 * simulation.step_s


def test_groups_that_are_left_process_the_samples_of_the_one_that_is_away() -> None:
    job = job_of(32, replica_groups=4)
    simulation = run(job, leaves=(Leave(node=1, from_step=50, steps=100),))
    full, less = simulation.on.by_step[10], simulation.on.by_step[80]
    assert less / full == pytest.approx(3 / 4, rel=0.05)
    assert simulation.on.by_step[160] == full


def test_a_batch_that_shrinks_keeps_its_step_time() -> None:
    job = job_of(32, replica_groups=4, on_loss="shrink")
    simulation = run(job, leaves=(Leave(node=1, from_step=50, steps=100),))
    assert simulation.on.by_step[80] / simulation.on.by_step[10] == pytest.approx(3 / 4)


def test_replica_groups_take_samples_by_their_speed() -> None:
    """A group that knows no shares inside it, since all of its ranks are slow, gets fewer samples."""
    job = job_of(32, replica_groups=4)
    simulation = run(job, slow_nodes=(SlowNode(node=2, factor=2, from_step=20),))
    assert {decision.kind for decision in simulation.decisions} == {"group_shares"}
    assert len(simulation.decisions) <= 3 and simulation.decisions[-1].step < 60
    assert simulation.won_back is not None and simulation.won_back >= 0.85


def test_a_group_that_came_back_does_not_know_its_speed_yet() -> None:
    job = job_of(32, replica_groups=4)
    slow = SlowNode(node=1, factor=2, from_step=20)
    simulation = run(job, slow_nodes=(slow,), leaves=(Leave(node=1, from_step=100, steps=50),))
    assert simulation.on.by_step[151] < 0.7 * simulation.on.by_step[90]
    assert simulation.on.by_step[-1] == pytest.approx(simulation.on.by_step[90], rel=0.02)


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    first, second = (run(job_of(64), slow_devices=(SLOW,), seed=4) for _ in range(2))
    assert first == second
