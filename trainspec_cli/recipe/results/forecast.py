"""The forecast of a whole run: duration, useful fraction and cost, each with an interval."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainspec_cli.recipe.keys.resilience import RecoveryMode


@dataclass(frozen=True)
class Interval:
    """An expected value and the bounds of its 90% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Assumption:
    """An input of the forecast that the user may know better."""

    key: str
    """The key that changes it, such as `cluster.site.pue`."""
    value: float
    known_within: float = 1.0
    """2 means between half and twice the value; 1 means exact."""
    source: str = ""
    verified: bool = True


@dataclass(frozen=True)
class Goodput:
    """The fractions of the run's wall time, which sum to 1, under one recovery mode."""

    mode: RecoveryMode
    goodput: Interval
    """Time of kept work over wall time."""
    lost: dict[str, float]
    """checkpoint, rework (undone by failures), restart, stall (survivors wait), shrunk (groups are away), dip (a
    network of several planes is slower while a link flaps)."""
    failures: float
    """Over the run."""
    mtbf_s: float
    """Mean time between failures of the whole job."""
    checkpoint_interval_s: float
    """Time of work between checkpoints."""
    checkpoint_interval_steps: int
    optimal_interval_s: float
    """Daly's interval; the same as the interval unless the recipe sets its own."""
    checkpoint_s: float
    """Time for which one checkpoint holds training up."""
    checkpoint_bytes: float
    restart_s: float
    """The time from a failure to the first new work after a restart."""
    wall_time_s: float
    """Expected, of the whole run."""
    layout: str = ""
    """The layout, where it is another one than the run's."""


@dataclass(frozen=True)
class BatchForecast:
    """Steps of one size, of a run whose batch changes."""

    step_samples: int
    steps: int
    step_time_s: float


@dataclass(frozen=True)
class RunForecast:
    """The run from its first step to its last."""

    steps: int
    """Where the batch follows the measured noise scale, it makes no more than these."""
    tokens: float
    """Samples, for a model of images."""
    wall_time_s: Interval
    goodput: Goodput
    """Goodput under the recipe's `resilience.mode`."""
    energy_joules: Interval | None
    """None where the power of the accelerator is not known."""
    carbon_kg: Interval | None
    cost_usd: Interval | None
    """None where no price is known."""
    alternatives: tuple[Goodput, ...] = ()
    """The other recovery modes, for comparison."""
    energy_parts_joules: dict[str, float] = field(default_factory=dict)
    """accelerators, hosts, building: sums to the energy."""
    cost_parts_usd: dict[str, float] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    batches: tuple[BatchForecast, ...] = ()
    """Sizes of the batch in order; empty for a constant batch, and for one that follows what the run will measure."""


# A disturbed run in simulation: its speed without the scheduler, with it, and at best, and what was decided.


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
