"""The warning of a time limit that is shorter than the run is predicted to train."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainspec_cli.core.printable import format_duration
from trainspec_cli.planner.this_machine import predict_device
from trainspec_cli.recipe.keys.cluster import SlurmSpec
from trainspec_cli.session.slurm.submit import machine_of_job, plan_runs, short_limit, warnings

H100 = (
    "recipe=tiny",
    "cluster=h100",
    "cluster.num_nodes=2",
    "batching.global_batch_size=64",
    "train.max_steps=1000000",
)


@pytest.fixture(scope="module")
def trains_s() -> float:
    (run,) = plan_runs(H100, [])
    return predict_device(run.plan.as_one_group, machine_of_job(run.loaded)).step_time_s * 1_000_000


@pytest.mark.parametrize(
    ("part", "max_requeues", "said"),
    [
        (1.5, 10, None),
        (0.6, 10, "at least once"),
        (0.3, 10, "at least 3 times"),
        (0.1, 4, "least 10 requeues, but"),
        (0.6, 0, "not requeued"),
    ],
)
def test_a_limit_shorter_than_the_run_is_said_with_both_figures(
    trains_s: float, part: float, max_requeues: int, said: str | None
) -> None:
    minutes = round(part * trains_s / 60)
    (run,) = plan_runs([*H100, f"cluster.slurm.time='{minutes}'", f"cluster.slurm.max_requeues={max_requeues}"], [])
    found = warnings([run])
    if said is None:
        assert found == []
        return
    (line,) = found
    assert line.startswith(f"cluster.slurm.time is {minutes} ({format_duration(60 * minutes)}, ")
    assert " 120 s" in line and f" {format_duration(trains_s)}: " in line and said in line


def test_without_a_prediction_or_a_limit_nothing_is_said(here) -> None:
    """The tests' own cache holds no probe of this machine."""
    (run,) = plan_runs(H100, [])
    machine = machine_of_job(run.loaded)
    assert list(short_limit(run.plan, machine)) == []
    short = replace(run.plan.spec.cluster, slurm=SlurmSpec(time="3"))
    unknown = replace(machine, gpu_names=("of our own make",) * 8)
    assert list(short_limit(replace(run.plan, spec=replace(run.plan.spec, cluster=short)), unknown)) == []
    unlimited = replace(run.plan.spec.cluster, slurm=SlurmSpec(time="0"))
    assert list(short_limit(replace(run.plan, spec=replace(run.plan.spec, cluster=unlimited)), machine)) == []
