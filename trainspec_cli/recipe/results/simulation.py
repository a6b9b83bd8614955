"""A disturbed run in simulation: its speed without the scheduler, with it, and at best, and what was decided."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedPace:
    """One way of dividing the samples, over the whole run."""

    wall_s: float
    samples_per_s: float
    """Mean rate of the run."""
    by_step: tuple[float, ...]
    """Samples a second of each step."""


@dataclass(frozen=True)
class SimulatedDecision:
    step: int
    """The first step that it holds for."""
    kind: str
    """`shares` of the data-parallel ranks, `group_shares` of the replica groups, `layers` of the pipeline's stages, or
    another `layout`."""
    group: int | None
    """The replica group, where there are several."""
    reason: str
    micro_batch_size: int | None
    micro_batches: int | None
    before_s: float
    """The slowest rank's computing in a step as it was, by the confirmed speeds; of another layout, the whole step."""
    expected_s: float
    """The same as expected after the decision; with other layers or another layout, once speeds are known again and
    shares follow."""
    achieved_s: float
    """The same in the decision's first step."""


@dataclass(frozen=True)
class Simulation:
    name: str
    description: str
    steps: int
    step_s: float
    """Seconds of an undisturbed step."""
    global_batch_size: int
    data_parallel_ranks: int
    replica_groups: int
    micro_batch_size: int
    largest_micro_batch_size: int
    report_interval: int
    """Steps between two exchanges of the ranks' speeds."""
    events: tuple[str, ...]
    off: SimulatedPace
    """The scheduler changes nothing."""
    on: SimulatedPace
    """It decides as in a run with `scheduler.mode=auto`."""
    ideal: SimulatedPace
    """The best division into whole samples by the true speeds, at once and without cost."""
    ideal_real: SimulatedPace
    """The same, if samples could be cut."""
    won_back: float | None
    """Fraction won back of the time lost without the scheduler, relative to what whole samples allow; None where that
    is nothing."""
    won_back_of_real: float | None
    """The same, over what the speeds alone allow."""
    decisions: tuple[SimulatedDecision, ...]
