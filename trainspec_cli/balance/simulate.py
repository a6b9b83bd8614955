"""Simulate a disturbed run step by step, using the planner's times: with the live decisions (`live`), with even shares,
and at the optimum."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.balance.disturbance import Disturbance
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.balance.live import LiveRun, Situations
from trainspec_cli.balance.lost_nodes import NodePhase, NodeRules, split_phases
from trainspec_cli.recipe.results.forecast import SimulatedDecision, SimulatedPace, Simulation

WORTH_REPORTING = 1e-3
"""If even the optimum saves less than this fraction of the time, no recovered fraction is reported."""


def simulate(job: DisturbedJob, disturbance: Disturbance, name: str, rules: NodeRules | None = None) -> Simulation:
    """Simulate all steps under a disturbance that `check_cluster` has accepted. `rules`: for a run with one replica
    group, how it continues when a node leaves."""
    usual = Situations(job, Disturbance()).at(1)
    drawn = disturbance.drawn(usual.even_s, job.num_nodes, job.devices_per_node)
    interval = job.interval(usual.even_s)
    phases = split_phases(job, drawn, rules, usual.even_s) if rules and drawn.leaves else []
    samples: list[int] = []
    off_s: list[float] = []
    ideal_s: list[float] = []
    real_s: list[float] = []
    on_s: list[float] = []
    decisions: list[SimulatedDecision] = []
    whole = NodePhase(1, job, tuple(range(job.num_nodes)))
    ends = [phase.from_step - 1 for phase in phases[1:]] + [drawn.steps]
    for phase, last in zip(phases or [whole], ends, strict=True):
        met = phase.translate(drawn) if phases else drawn
        situations = Situations(phase.job, met)
        live = LiveRun(phase.job, met, interval)
        for step in range(phase.from_step, last + 1):
            situation = situations.at(step)
            # A restart costs the same with and without the scheduler.
            pause_s = phase.pause_s if step == phase.from_step else 0.0
            if phase.reason and step == phase.from_step:
                before_s = off_s[-1]
                after_s = situation.even_s
                reason = f"{phase.reason}, after {pause_s:.0f} s without new steps"
                decisions.append(SimulatedDecision(step, "nodes", None, reason, None, None, before_s, after_s, after_s))
            samples.append(situation.samples)
            off_s.append(situation.even_s + pause_s)
            ideal_s.append(situation.ideal.whole_s + pause_s)
            real_s.append(situation.ideal.real_s + pause_s)
            on_s.append(live.make_step(step, situation) + pause_s)
        decisions += live.decisions
    off, ideal, real, on = (_pace(seconds, samples) for seconds in (off_s, ideal_s, real_s, on_s))
    return Simulation(
        name=name,
        description=drawn.description,
        steps=drawn.steps,
        step_s=usual.even_s,
        global_batch_size=job.batching.global_batch_size,
        data_parallel_ranks=job.cluster.ranks,
        replica_groups=len(job.groups),
        micro_batch_size=job.even.micro_batch_size,
        largest_micro_batch_size=job.largest_micro_batch,
        report_interval=interval,
        events=tuple(event.describe() for event in drawn.events),
        off=off,
        on=on,
        ideal=ideal,
        ideal_real=real,
        won_back=_won_back(off, on, ideal),
        won_back_of_real=_won_back(off, on, real),
        decisions=tuple(decisions),
    )


def _pace(seconds: Sequence[float], samples: Sequence[int]) -> SimulatedPace:
    by_step = tuple(count / taken_s for count, taken_s in zip(samples, seconds, strict=True))
    return SimulatedPace(sum(seconds), sum(samples) / sum(seconds), by_step)


def _won_back(off: SimulatedPace, on: SimulatedPace, ideal: SimulatedPace) -> float | None:
    lost_s = off.wall_s - ideal.wall_s
    return (off.wall_s - on.wall_s) / lost_s if lost_s > WORTH_REPORTING * off.wall_s else None
