"""How often a job fails, how long it takes to come back, and what is lost."""

from __future__ import annotations

from dataclasses import dataclass

from trainspec_cli.spec.recipe.cluster import ReliabilitySpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec


@dataclass(frozen=True)
class Durations:
    """Seconds that each way of coming back takes, for one job on one cluster."""

    detect_s: float
    swap_s: float
    start_s: float
    load_s: float
    """Reading the checkpoint."""
    heal_s: float
    """Copying the state from a healthy group."""
    shrink_stall_s: float
    rejoin_stall_s: float

    @property
    def restart_s(self) -> float:
        """Seconds from a failure to the first new work of a job that starts again, with a spare at hand."""
        return self.detect_s + self.swap_s + self.start_s + self.load_s

    @property
    def group_return_s(self) -> float:
        """Seconds from a failure until the failed group could join again, with a spare at hand."""
        return self.detect_s + self.swap_s + self.start_s + self.heal_s


def durations(cluster: ReliabilitySpec, state_bytes_per_device: float, load_s: float) -> Durations:
    """Return those of a job whose devices hold `state_bytes_per_device` of training state each."""
    return Durations(
        detect_s=cluster.detect_s,
        swap_s=cluster.swap_s,
        start_s=cluster.start_s,
        load_s=load_s,
        heal_s=state_bytes_per_device / (cluster.heal_gb_per_s * 1e9),
        shrink_stall_s=cluster.shrink_stall_s,
        rejoin_stall_s=cluster.rejoin_stall_s,
    )


def lost_work_s(state_is_lost: bool, since_checkpoint_s: float, since_step_s: float) -> float:
    """Return the work that a failure undoes: all since the last whole checkpoint where no replica group holds the state
    any more, else the step that was not committed."""
    return since_checkpoint_s if state_is_lost else since_step_s


def capacity(active_groups: int, replica_groups: int) -> float:
    """Return the part of the full rate at which samples are consumed: each group that is away takes its share along."""
    return active_groups / replica_groups


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
