"""The forecast of a complete run: duration, productive fraction and cost, each with an interval."""

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
    """An input of the forecast that the user may know more precisely."""

    key: str
    """The key that sets it, such as `cluster.site.pue`."""
    value: float
    known_within: float = 1.0
    """2 means between half and twice the value; 1 means exact."""
    source: str = ""
    verified: bool = True


@dataclass(frozen=True)
class Goodput:
    """The fractions of the run's wall time with one recovery mode, which sum to 1."""

    mode: RecoveryMode
    goodput: Interval
    """Time spent on work that is kept, as a fraction of wall time."""
    lost: dict[str, float]
    """checkpoint, rework (work undone by failures), restart, stall (survivors wait), shrunk (groups are down), dip (a
    network with several planes is slower while a link flaps)."""
    failures: float
    """Number of failures during the run."""
    mtbf_s: float
    """Mean time between failures of the job."""
    checkpoint_interval_s: float
    """Amount of work between checkpoints, in seconds."""
    checkpoint_interval_steps: int
    optimal_interval_s: float
    """Daly's interval; equal to `checkpoint_interval_s` unless the recipe specifies another one."""
    checkpoint_s: float
    """How long one checkpoint stalls training."""
    checkpoint_bytes: float
    restart_s: float
    """Time from a failure until the run does new work after the restart."""
    wall_time_s: float
    """Expected wall time of the run."""
    layout: str = ""
    """The layout with this recovery mode, if it differs from the run's."""


@dataclass(frozen=True)
class BatchForecast:
    """The steps with one batch size, in a run whose batch size changes."""

    step_samples: int
    steps: int
    step_time_s: float


@dataclass(frozen=True)
class RunForecast:
    """The run from its first step to its last."""

    steps: int
    """Number of steps; the largest possible number if the batch follows the measured noise scale."""
    tokens: float
    """Number of tokens; for an image model, of samples."""
    wall_time_s: Interval
    goodput: Goodput
    """Goodput with the recipe's `resilience.mode`."""
    energy_joules: Interval | None
    """None if the power of the accelerator is unknown."""
    carbon_kg: Interval | None
    cost_usd: Interval | None
    """None if no price is known."""
    alternatives: tuple[Goodput, ...] = ()
    """The other recovery modes, for comparison."""
    energy_parts_joules: dict[str, float] = field(default_factory=dict)
    """Energy of accelerators, hosts and building; the parts sum to the total."""
    cost_parts_usd: dict[str, float] = field(default_factory=dict)
    assumptions: tuple[Assumption, ...] = ()
    notes: tuple[str, ...] = ()
    batches: tuple[BatchForecast, ...] = ()
    """Batch sizes in order; empty if the batch is constant or depends on measurements made during the run."""


# A simulated disturbed run: its speed without the scheduler, with it and in the ideal case, and the scheduler's
# decisions.


@dataclass(frozen=True)
class SimulatedPace:
    """The speed during the entire run, for one way of dividing the samples."""

    wall_s: float
    samples_per_s: float
    """Mean rate of the run."""
    by_step: tuple[float, ...]
    """Samples per second of each step."""


@dataclass(frozen=True)
class SimulatedDecision:
    step: int
    """The first step that it applies to."""
    kind: str
    """`shares` of the data-parallel ranks, `group_shares` of the replica groups, `layers` of the pipeline stages,
    another `layout`, or other `nodes` after one was lost or has returned."""
    group: int | None
    """The replica group, if there are several groups."""
    reason: str
    micro_batch_size: int | None
    micro_batches: int | None
    before_s: float
    """The slowest rank's compute time per step before the decision, at the confirmed speeds; for another layout, the
    duration of the complete step."""
    expected_s: float
    """The time expected after the decision. If layers or the layout change, it is reached only after speeds have been
    measured again and sample shares adapted."""
    achieved_s: float
    """The time achieved in the first step after the decision."""


@dataclass(frozen=True)
class Simulation:
    name: str
    description: str
    steps: int
    step_s: float
    """Duration of an undisturbed step."""
    global_batch_size: int
    data_parallel_ranks: int
    replica_groups: int
    micro_batch_size: int
    largest_micro_batch_size: int
    report_interval: int
    """Number of steps between two exchanges of the ranks' speeds."""
    events: tuple[str, ...]
    off: SimulatedPace
    """The scheduler changes nothing."""
    on: SimulatedPace
    """The scheduler decides as in a run with `scheduler.mode=auto`."""
    ideal: SimulatedPace
    """The best division into whole samples for the true speeds, applied immediately and at no cost."""
    ideal_real: SimulatedPace
    """Speed of the best division for the true speeds, if a sample could be split across ranks."""
    won_back: float | None
    """Time that the scheduler recovers, as a fraction of the time that the ideal division into whole samples would
    recover; None if nothing can be recovered."""
    won_back_of_real: float | None
    """The same, as a fraction of what the ideal division would recover if samples could be split."""
    decisions: tuple[SimulatedDecision, ...]
