"""What breaks on a cluster, and how long each part of coming back takes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ReliabilitySpec:
    """Failures strike each device alike and without memory (a Poisson process); the rest are mean durations."""

    mtbf_device_hours: float = 50_677.0
    """Device-hours between failures that end a synchronous job (a cluster of n devices fails n times as often)."""
    job_wide_fraction: float = 0.129
    """Part of the failures that no replica group survives: a bug in the software hits all of them."""
    detect_s: float = 60.0
    """From the failure until the job is known to be dead, and why."""
    swap_s: float = 120.0
    """Until a spare node stands in the failed one's place."""
    start_s: float = 300.0
    """Processes, communicators and compilation, up to the first step; reading the checkpoint comes on top."""
    repair_s: float = 86_400.0
    """Until a failed node is a spare again."""
    spare_nodes: int | None = None
    """Nodes that stand by; null: one whenever it is needed."""
    shrink_stall_s: float = 30.0
    """Elastic: the survivors stand still this long, from the failure until they step on without the failed group."""
    rejoin_stall_s: float = 15.0
    """Elastic: they wait this long when the healed group joins."""
    heal_gb_per_s: float = 10.0
    """Elastic: a device of the new group copies its state from its peer in a healthy one."""
    known_within: dict[str, float] = field(default_factory=dict)
    """How well each value is known: 2 means between half and twice the value, nine times in ten."""
    sources: dict[str, str] = field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    """Keys whose value was not checked against its source."""
