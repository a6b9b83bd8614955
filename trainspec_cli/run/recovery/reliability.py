"""Compute a job's failure rate, recovery time and lost work."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainspec_cli.recipe.field_types import LARGEST_WHOLE
from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.recipe.results.doctor import NodeFault

PRIOR_WEIGHT = 1 / math.log(10) ** 2
"""Weight of the failure rate stated for the cluster, expressed as a number of observed failures. The stated rate is
assumed to be uncertain by a factor of 10 (one standard deviation of its logarithm). A rate from N observed failures has
a variance of about 1/N in its logarithm."""


@dataclass(frozen=True)
class Durations:
    """Time in seconds that each phase of a recovery takes. The first three are inputs with their sources
    (`conf/reliability`)."""

    detect_s: float
    """From the failure until it is detected and diagnosed."""
    swap_s: float
    """Until a spare has replaced a lost node."""
    start_s: float
    """Until the first step: processes, communicators and compilation."""
    load_s: float
    """Reading a checkpoint."""
    heal_s: float
    """Copying a device's state from another node's memory."""
    save_s: float = 0.0
    """Writing a checkpoint before a planned restart."""

    @property
    def restart_s(self) -> float:
        """Time from a failure to the first new work, for a job that gets a spare node and reads its checkpoint."""
        return self.detect_s + self.swap_s + self.start_s + self.load_s

    @property
    def group_return_s(self) -> float:
        """Time from a failure until a replica group with a spare node can rejoin with a healthy group's state."""
        return self.detect_s + self.swap_s + self.start_s + self.heal_s


def durations(cluster: ReliabilitySpec, state_bytes_per_device: float, load_s: float) -> Durations:
    """Return the recovery times of a job with `state_bytes_per_device` bytes of training state on each device. Writing
    a checkpoint takes as long as reading it."""
    heal_s = state_bytes_per_device / (cluster.heal_gb_per_s * 1e9)
    return Durations(cluster.detect_s, cluster.swap_s, cluster.start_s, load_s, heal_s, load_s)


def job_mtbf_s(cluster: ReliabilitySpec, devices: int) -> float:
    """Return the mean time between failures of a job on `devices` devices."""
    return cluster.mtbf_device_hours * 3600 / devices


def updated_mtbf_s(mtbf_s: float, failures: int, observed_s: float) -> float:
    """Return the mean time between failures, updated after `failures` failures in `observed_s` of run time: the
    weighted mean of the logarithms of the expected value (`mtbf_s`) and the observed one. Without failures, it is
    `mtbf_s`."""
    if not failures:
        return mtbf_s
    seen_s = max(observed_s, 1.0) / failures
    if math.isinf(mtbf_s):
        return seen_s
    return math.exp((PRIOR_WEIGHT * math.log(mtbf_s) + failures * math.log(seen_s)) / (PRIOR_WEIGHT + failures))


def rollback_mtbf_s(resilience: ResilienceSpec, cluster: ReliabilitySpec, mtbf_s: float, replica_groups: int) -> float:
    """Return the mean time between failures that send the run back to a checkpoint. Only these failures make
    checkpoints necessary. An elastic run with two or more groups goes back only after a job-wide failure (simultaneous
    independent failures of all groups are neglected: their rate is of second order)."""
    if resilience.mode != "elastic" or replica_groups == 1:
        return mtbf_s
    return mtbf_s / cluster.job_wide_fraction if cluster.job_wide_fraction else float("inf")


# Nodes that fail again and again.


REPEATED = 2
"""A node that has failed this many times for one cause is examined before it is used again."""


COUNTED = ("nic", "nvlink")
"""Causes that are read from counters of a link. They also rise on healthy nodes when a node that they exchange with
fails."""


def repeated_faults(failures: Iterable[tuple[str, NodeFault | None]]) -> dict[str, tuple[str, int]]:
    """Return the hostnames of the nodes that have failed repeatedly for one cause since they were last examined, with
    the cause and the number of failures. `failures`: hostnames and faults in order; None if the node was examined and
    nothing was found. Messages about the program do not count, because it may fail anywhere."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for host, fault in failures:
        if fault is None:
            counts[host].clear()
        elif fault.is_of_machine and fault.cause not in COUNTED:
            counts[host][fault.cause] += 1
    most = {host: causes.most_common(1)[0] for host, causes in counts.items() if causes}
    return {host: found for host, found in most.items() if found[1] >= REPEATED}


# The checkpoint interval: writing checkpoints should cost as much time as the work that failures undo.


AUTO_SHORTEST_S = 60.0
"""Minimum working time in seconds before the first checkpoint with `auto`, and between two of them. Shorter runs
write only the last checkpoint; restarting them would take longer than this anyway."""
MOST_LOST_S = 600.0
"""Maximum working time in seconds between checkpoints with `auto`, if they are cheap."""
MOST_WAITED = 0.05
"""The largest fraction of the total time that checkpoints with `auto` may block training."""


def young_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, first order: sqrt(2 C M) (Young 1974, doi:10.1145/361147.361115).

    `checkpoint_s` (C) is the time that a checkpoint blocks training, and `mtbf_s` (M) is the mean time between failures
    of the entire job. The result is accurate while C is small compared with M; at C = M/10 the loss is about 1% above
    the minimum.
    """
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def daly_interval_s(checkpoint_s: float, mtbf_s: float) -> float:
    """Work between checkpoints, higher order (Daly 2006, eq. 37, doi:10.1016/j.future.2004.11.016).

    sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C below C = 2 M, and M above it.
    """
    if math.isinf(mtbf_s):
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    if ratio >= 1:
        return mtbf_s
    return young_interval_s(checkpoint_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def checkpoint_interval_s(blocked_s: float, written_s: float, mtbf_s: float) -> float:
    """Return Daly's interval, given the time `blocked_s` that a checkpoint blocks training. The interval is at least
    the time needed to write a checkpoint."""
    return max(daly_interval_s(blocked_s, mtbf_s), written_s)


def auto_interval_s(blocked_s: float, written_s: float, mtbf_s: float) -> float:
    """Return the interval for `checkpoint.interval_steps: auto`. It is the result of `checkpoint_interval_s`, clamped
    because runs also end for reasons other than failures. The lower limit is one minute. The upper limit is ten minutes
    or twenty times `blocked_s`, whichever is longer, so that training spends at most a twentieth of its time
    waiting."""
    longest_s = max(MOST_LOST_S, blocked_s / MOST_WAITED)
    return max(min(daly_interval_s(blocked_s, mtbf_s), longest_s), written_s, AUTO_SHORTEST_S)


def checkpoint_interval_steps(interval_s: float, step_time_s: float) -> int:
    """Return the nearest integer number of steps, at least one. For an infinite interval, return a number that is
    larger than any run's step count but still fits into a record."""
    if math.isinf(interval_s):
        return LARGEST_WHOLE
    return max(1, round(interval_s / step_time_s))


# Decide which replica groups take the next step together, and which group copies the state from which.


@dataclass(frozen=True)
class ConnectedGroup:
    heard_at_s: float
    asked_at_s: float = math.inf
    """The time when the group asked to take part in the next step; infinite while the group is computing."""

    @property
    def asks(self) -> bool:
        return self.asked_at_s < math.inf


@dataclass(frozen=True)
class QuorumRules:
    silence_s: float
    """A replica group that has been silent for this many seconds is considered dead."""
    patience_s: float
    """Time in seconds that replica groups wait for a group that is alive but has not asked to take part."""


def choose_members(
    groups: Mapping[str, ConnectedGroup], previous: Collection[str], now_s: float, rules: QuorumRules
) -> list[str]:
    """Return the names of the replica groups that take the next step, in order; empty while they have to wait.

    They start immediately if all members of the previous quorum ask. Otherwise, more than half of the live groups must
    ask; they start when all live groups ask, or when the first of them has waited long enough."""
    living = {name: each for name, each in groups.items() if now_s - each.heard_at_s <= rules.silence_s}
    asking = {name: each for name, each in living.items() if each.asks}
    if previous and all(name in asking for name in previous):
        return sorted(asking)
    if not asking or 2 * len(asking) <= len(living):
        return []
    waited_s = now_s - min(each.asked_at_s for each in asking.values())
    return sorted(asking) if len(asking) == len(living) or waited_s >= rules.patience_s else []


@dataclass(frozen=True)
class Healing:
    """Copying of training state before a step, between a rank of a replica group and the same rank in other
    groups."""

    gives_to: tuple[int, ...]
    """Quorum indices of the groups that copy the state from this rank's group."""
    takes_from: int | None
    """Quorum index of the group that this rank copies the state from; None if its own state is the newest."""


def plan_healing(steps: Sequence[int], place: int, rank: int) -> Healing:
    """Plan the copies of rank `rank` in the group at index `place`; `steps` lists the number of updates that each group
    has made. The groups that are behind are distributed among the groups that are ahead. To spread the load, the
    assignment differs from rank to rank."""
    front = [other for other, step in enumerate(steps) if step == max(steps)]
    behind = [other for other, step in enumerate(steps) if step < max(steps)]
    sources = {other: front[(number + rank) % len(front)] for number, other in enumerate(behind)}
    return Healing(tuple(other for other, source in sources.items() if source == place), sources.get(place))
