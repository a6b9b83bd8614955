"""What to do when something fails: who steps on, from which state, and what is lost. Decisions, not deeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainspec_cli.spec.recipe.reliability import ReliabilitySpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec

Action = Literal["restart", "shrink", "wait"]


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
        """From a failure to the first new work of a job that starts again, with a spare at hand."""
        return self.detect_s + self.swap_s + self.start_s + self.load_s

    @property
    def group_return_s(self) -> float:
        """From a failure until the failed group could join again, with a spare at hand."""
        return self.detect_s + self.swap_s + self.start_s + self.heal_s


def durations(cluster: ReliabilitySpec, state_bytes_per_device: float, load_s: float) -> Durations:
    """Those of a job whose devices hold `state_bytes_per_device` of training state each."""
    return Durations(
        detect_s=cluster.detect_s,
        swap_s=cluster.swap_s,
        start_s=cluster.start_s,
        load_s=load_s,
        heal_s=state_bytes_per_device / (cluster.heal_gb_per_s * 1e9),
        shrink_stall_s=cluster.shrink_stall_s,
        rejoin_stall_s=cluster.rejoin_stall_s,
    )


def decide(resilience: ResilienceSpec, surviving_groups: int, job_wide: bool) -> Action:
    """What follows a failure that leaves `surviving_groups` replica groups whole.

    `restart` from the last checkpoint when no group holds the state any more; `shrink` to the survivors; `wait` for
    groups to come back when too few are left to step on, but their state is.
    """
    if resilience.mode != "elastic" or job_wide or surviving_groups == 0:
        return "restart"
    return "shrink" if surviving_groups >= resilience.min_groups else "wait"


RESTART_WINDOW_S = 3600.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


def may_restart(resilience: ResilienceSpec, restarts_s: Sequence[float], now_s: float) -> bool:
    """Whether what failed may be started again, having been started again at `restarts_s` (any clock)."""
    recent = [at for at in restarts_s if now_s - at < RESTART_WINDOW_S]
    return resilience.mode != "none" and len(recent) < resilience.max_restarts_per_hour


def pause_s(failures_in_a_row: int) -> float:
    """Before the next start: none after a failure of what had worked, then doubling."""
    if failures_in_a_row <= 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (failures_in_a_row - 2)))


def enough_groups(resilience: ResilienceSpec, groups_left: int) -> bool:
    """Whether the run goes on with the groups that are there or can come back."""
    return groups_left >= resilience.min_groups


def lost_work_s(action: Action, since_checkpoint_s: float, since_step_s: float) -> float:
    """Work that the failure undoes: all since the last whole checkpoint, or the step that was not committed."""
    return since_checkpoint_s if action == "restart" else since_step_s


def capacity(active_groups: int, replica_groups: int) -> float:
    """Part of the full rate at which samples are consumed: each group that is away takes its share along."""
    return active_groups / replica_groups


def job_mtbf_s(cluster: ReliabilitySpec, devices: int) -> float:
    """Mean time between failures of a job on `devices` devices."""
    return cluster.mtbf_device_hours * 3600 / devices


def rollback_mtbf_s(resilience: ResilienceSpec, cluster: ReliabilitySpec, mtbf_s: float, replica_groups: int) -> float:
    """Mean time between failures that throw the run back to a checkpoint: checkpoints are for these alone.

    An elastic run with two groups or more goes back only after a job-wide failure (that all groups fail at once by
    chance is left out: it is rarer by the square of the rate).
    """
    if resilience.mode != "elastic" or replica_groups == 1:
        return mtbf_s
    return mtbf_s / cluster.job_wide_fraction if cluster.job_wide_fraction else float("inf")
