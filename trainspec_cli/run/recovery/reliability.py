"""How often a job fails, how long it takes to come back, and what is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec

PRIOR_WEIGHT = 1 / math.log(10) ** 2
"""Failures that the cluster's own figure counts as: it is taken to be right within a factor of 10, one standard
deviation of its logarithm. N failures that were seen give the logarithm of the rate with a variance of about 1/N."""


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


def updated_mtbf_s(mtbf_s: float, failures: int, observed_s: float) -> float:
    """Return the mean time between failures after `failures` were seen in `observed_s` of running, where `mtbf_s` was
    expected: the logarithms of both, weighted by what each says of the rate. Without a failure it stays as it was."""
    if not failures:
        return mtbf_s
    seen_s = max(observed_s, 1.0) / failures
    if math.isinf(mtbf_s):
        return seen_s
    return math.exp((PRIOR_WEIGHT * math.log(mtbf_s) + failures * math.log(seen_s)) / (PRIOR_WEIGHT + failures))


def rollback_mtbf_s(resilience: ResilienceSpec, cluster: ReliabilitySpec, mtbf_s: float, replica_groups: int) -> float:
    """Return the mean time between failures that throw the run back to a checkpoint: checkpoints are for these alone.

    An elastic run with two groups or more goes back only after a job-wide failure (that all groups fail at once by
    chance is left out: it is rarer by the square of the rate).
    """
    if resilience.mode != "elastic" or replica_groups == 1:
        return mtbf_s
    return mtbf_s / cluster.job_wide_fraction if cluster.job_wide_fraction else float("inf")
