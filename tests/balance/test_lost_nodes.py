"""A disturbed run with one replica group, whose nodes leave and return."""

from __future__ import annotations

from dataclasses import replace

import pytest
from balance.jobs import job_of

from trainspec_cli.balance.disturbance import Disturbance, Leave, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.balance.lost_nodes import NodePhase, NodeRules, split_phases
from trainspec_cli.balance.simulate import simulate
from trainspec_cli.planner.run import goodput
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import NodeLossResponse, ResilienceSpec
from trainspec_cli.recipe.results.forecast import Simulation
from trainspec_cli.run.recovery.reliability import Durations

TAKES = Durations(detect_s=10.0, swap_s=20.0, start_s=40.0, load_s=30.0, heal_s=0.0, save_s=30.0)
JOB = job_of(32)
"""Four nodes."""
INTERVAL_STEPS = 20


def rules(response: NodeLossResponse = "continue", spares: int = 0, *fits: int, total: int = 10_000) -> NodeRules:
    def job_on(nodes: int) -> DisturbedJob | None:
        return job_of(8 * nodes, each=32 * 4 // nodes) if nodes in fits else None

    resilience = ResilienceSpec(after_node_loss=response)
    return NodeRules(resilience, spares, job_on, TAKES, INTERVAL_STEPS, total)


def run(given: NodeRules, *leaves: Leave) -> Simulation:
    return simulate(JOB, Disturbance(noise=0.0, leaves=leaves), "x", given)


AWAY = Leave(node=1, from_step=50, steps=100)


@pytest.mark.parametrize(
    ("given", "nodes", "pauses_s"),
    [
        (rules("continue", 1), [(0, 2, 3, 4)], [100.0]),
        (rules("continue", 0, 2), [(0, 2), (0, 2, 3, 1)], [80.0, 100.0]),
        (rules("continue", 0, 2, total=160), [(0, 2)], [80.0]),
        (rules("wait"), [(0, 1, 2, 3)], [70.0]),
        (rules("end", 0, 2), [(0, 1, 2, 3)], [70.0]),
    ],
    ids=["a spare", "two nodes fit", "it ends soon", "it waits", "it ends and is started again"],
)
def test_pauses_and_nodes(given: NodeRules, nodes: list[tuple[int, ...]], pauses_s: list[float]) -> None:
    """Nine steps are lost: 49 were made, and 40 are in a checkpoint. A run that waits does so for 100 steps, of which
    the 10 s until the loss is detected are part."""
    step_s = 2.0
    before, *after = split_phases(JOB, Disturbance(leaves=(AWAY,)), given, step_s)
    assert before == NodePhase(1, JOB, (0, 1, 2, 3))
    waits_s = 100 * step_s if given.resilience.after_node_loss != "continue" else 0.0
    lost_s = 9 * step_s
    assert [phase.nodes for phase in after] == nodes
    assert [phase.pause_s for phase in after] == [pauses_s[0] + lost_s + waits_s, *pauses_s[1:]]
    assert [phase.from_step for phase in after] == [50, 150][: len(after)]


@pytest.mark.parametrize("response", ["continue", "wait", "end"])
@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("fits", [(3,), (2,), ()])
def test_the_same_as_in_the_simulation_of_goodput(
    response: NodeLossResponse, spares: int, fits: tuple[int, ...]
) -> None:
    """Both lose a node at the same time, and get it back at the same time."""
    given = rules(response, spares, *fits)
    step_s = 2.0
    phases = split_phases(JOB, Disturbance(leaves=(AWAY,)), given, step_s)
    cluster = ReliabilitySpec(
        detect_s=TAKES.detect_s, swap_s=TAKES.swap_s, start_s=TAKES.start_s, repair_s=100 * step_s, spare_nodes=spares
    )
    job = goodput.SimulatedJob(
        work_s=10_000 * step_s,
        step_time_s=step_s,
        devices=32,
        replica_groups=1,
        interval_s=INTERVAL_STEPS * step_s,
        blocked_s=0.0,
        written_s=0.0,
        state_bytes_per_device=0.0,
        load_s=TAKES.load_s,
        nodes=4,
        speed_on=lambda nodes: nodes / 4 if nodes in fits else None,
    )
    failures = (goodput.FailureAt(49 * step_s, 1),)
    simulated = goodput.simulate(job, cluster, given.resilience, failures=failures)
    paused_s = sum(phase.pause_s for phase in phases)
    assert paused_s == pytest.approx(simulated.lost_s["rework"] + simulated.lost_s["restart"])
    lost = phases[1]
    if response == "continue":
        assert lost.pause_s == simulated.pause_s + simulated.lost_s["rework"]
        assert (simulated.lost_s["shrunk"] > 0) == (lost.job.num_nodes < 4)
    assert len(lost.nodes) == (4 if spares or response != "continue" else max((*fits, 0)) or 4)


def test_the_restart_is_paid_with_and_without_the_scheduler() -> None:
    simulation = run(rules("continue", 0, 2), AWAY)
    less, back = simulation.decisions
    assert [(one.kind, one.step) for one in (less, back)] == [("nodes", 50), ("nodes", 150)]
    assert less.expected_s / less.before_s == pytest.approx(2.0, rel=0.1), "two nodes have twice the samples"
    assert simulation.on.wall_s == simulation.off.wall_s == simulation.ideal.wall_s
    undisturbed = 200 * simulation.step_s + 100 * less.expected_s
    assert simulation.on.wall_s == pytest.approx(undisturbed + 80 + 9 * simulation.step_s + 100)
    assert len(simulation.on.by_step) == simulation.steps


def test_what_disturbs_a_node_that_is_away_or_elsewhere() -> None:
    events = Disturbance(
        slow_devices=(SlowDevice(device=8, factor=2), SlowDevice(device=25, factor=3)),
        slow_nodes=(SlowNode(node=2, factor=2), SlowNode(node=1, factor=2)),
        narrow_links=(NarrowLink(factor=2), NarrowLink(node=1, factor=2)),
        leaves=(AWAY,),
    )
    found = NodePhase(50, JOB, (0, 2, 3)).translate(events)
    assert found == replace(
        events,
        slow_devices=(SlowDevice(device=17, factor=3),),
        slow_nodes=(SlowNode(node=1, factor=2),),
        narrow_links=(NarrowLink(factor=2),),
        leaves=(),
    )
