"""How often a job fails, how long it takes to come back, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.recipe.cluster import ReliabilitySpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec


@dataclass(frozen=True)
class Durations:
    """Seconds that each way of coming back takes, for one job on one cluster, with a spare at hand."""

    restart_s: float
    """The time from a failure to the first new work of a job that starts again and reads its checkpoint."""
    group_return_s: float
    """The time from a failure until the failed group can join again, with the state of a healthy one."""
    heal_s: float
    """The part of `group_return_s` that copies the state."""


def durations(cluster: ReliabilitySpec, state_bytes_per_device: float, load_s: float) -> Durations:
    """Return those of a job whose devices hold `state_bytes_per_device` of training state each."""
    started_s = cluster.detect_s + cluster.swap_s + cluster.start_s
    heal_s = state_bytes_per_device / (cluster.heal_gb_per_s * 1e9)
    return Durations(started_s + load_s, started_s + heal_s, heal_s)


def job_mtbf_s(cluster: ReliabilitySpec, devices: int) -> float:
    """Return the mean time between failures of a job on `devices` devices."""
    return cluster.mtbf_device_hours * 3600 / devices


def rollback_mtbf_s(resilience: ResilienceSpec, cluster: ReliabilitySpec, mtbf_s: float, replica_groups: int) -> float:
    """Return the mean time between failures that throw the run back to a checkpoint: checkpoints are for these alone.

    An elastic run with two groups or more goes back only after a job-wide failure (that all groups fail at once by
    chance is left out: it is rarer by the square of the rate).
    """
    if resilience.mode != "elastic" or replica_groups == 1:
        return mtbf_s
    return mtbf_s / cluster.job_wide_fraction if cluster.job_wide_fraction else float("inf")
