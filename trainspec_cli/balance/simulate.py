"""Simulate a disturbed run step by step, using the planner's times: with the live decisions (`live`), with even shares,
and at the optimum."""

from __future__ import annotations

from collections.abc import Sequence

from trainspec_cli.balance.disturbance import Disturbance
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.balance.live import LiveRun, Situations
from trainspec_cli.recipe.results.forecast import SimulatedPace, Simulation

WORTH_REPORTING = 1e-3
"""If even the optimum saves less than this fraction of the time, no recovered fraction is reported."""


def simulate(job: DisturbedJob, disturbance: Disturbance, name: str) -> Simulation:
    """Simulate all steps under a disturbance that `check_cluster` has accepted."""
    usual = Situations(job, Disturbance()).at(1)
    drawn = disturbance.drawn(usual.even_s, job.num_nodes, job.devices_per_node)
    interval = job.interval(usual.even_s)
    situations = Situations(job, drawn)
    live = LiveRun(job, drawn, interval)
    met = [situations.at(step) for step in range(1, drawn.steps + 1)]
    on_s = [live.make_step(step, situation) for step, situation in enumerate(met, 1)]
    samples = [situation.samples for situation in met]
    off = _pace([situation.even_s for situation in met], samples)
    ideal = _pace([situation.ideal.whole_s for situation in met], samples)
    real = _pace([situation.ideal.real_s for situation in met], samples)
    on = _pace(on_s, samples)
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
        decisions=tuple(live.decisions),
    )


def _pace(seconds: Sequence[float], samples: Sequence[int]) -> SimulatedPace:
    by_step = tuple(count / taken_s for count, taken_s in zip(samples, seconds, strict=True))
    return SimulatedPace(sum(seconds), sum(samples) / sum(seconds), by_step)


def _won_back(off: SimulatedPace, on: SimulatedPace, ideal: SimulatedPace) -> float | None:
    lost_s = off.wall_s - ideal.wall_s
    return (off.wall_s - on.wall_s) / lost_s if lost_s > WORTH_REPORTING * off.wall_s else None
