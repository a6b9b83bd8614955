"""Failure rates of a cluster, and the durations of recovery."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.spec.numbers import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat


@dataclass(frozen=True)
class ReliabilitySpec:
    """Failures hit all devices equally and without memory (a Poisson process); the rest are mean durations."""

    mtbf_device_hours: PositiveFloat = 50_677.0
    """Device-hours between failures that end a synchronous job (a cluster of n devices fails n times as often)."""
    job_wide_fraction: Fraction = 0.129
    """Fraction of the failures that no replica group survives, such as a bug in the software."""
    detect_s: NonNegativeFloat = 60.0
    """The time until a failure is detected and diagnosed."""
    swap_s: NonNegativeFloat = 120.0
    """The time until a spare node has replaced the failed one."""
    start_s: NonNegativeFloat = 300.0
    """Processes, communicators and compilation, up to the first step; reading the checkpoint comes on top."""
    repair_s: NonNegativeFloat = 86_400.0
    """The time until a failed node is a spare again."""
    spare_nodes: NonNegativeInt | None = None
    """Nodes on standby; null: one whenever it is needed."""
    shrink_stall_s: NonNegativeFloat = 30.0
    """Elastic: how long the survivors stall, from the failure until they continue without the failed replica group."""
    rejoin_stall_s: NonNegativeFloat = 15.0
    """Elastic: how long they stall when the healed replica group joins."""
    heal_gb_per_s: PositiveFloat = 10.0
    """Elastic: the rate at which a device of the new replica group copies its state from a healthy peer."""
    known_within: dict[str, float] = field(default_factory=dict)
    """The uncertainty of each value: 2 means between half and twice the value with a probability of 90%."""
    sources: dict[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""
