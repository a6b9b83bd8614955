"""A backtest of the planner: its errors over a table of measured runs. Errors are fractions: 0.1 is 10%."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainspec_cli.recipe.keys.run import Offload, Recompute


@dataclass(frozen=True)
class ErrorSummary:
    rows: int
    mape: float
    """Mean absolute error."""
    median_ape: float
    bias: float
    """Median of the signed error."""
    worst_under: float = 0.0
    known_within: float = 1.0
    """Nine in ten predictions differ from the measurement by no more than this factor."""

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorSummary | None:
        if not errors:
            return None
        size = sorted(map(abs, errors))
        signed = sorted(errors)
        middle = len(errors) // 2
        factors = sorted(max(1 + error, 1 / (1 + error)) for error in errors)
        ninth_tenth = factors[math.ceil(0.9 * len(factors)) - 1]
        return cls(len(errors), sum(size) / len(size), size[middle], signed[middle], min(signed), ninth_tenth)


@dataclass(frozen=True)
class Ranking:
    """A sweep: runs of one source, model and machine that differ in their layout."""

    source: str
    model: str
    gpu: str
    layouts: int
    loss: float
    """The layout predicted fastest was measured slower than the fastest measured, by this fraction."""


@dataclass(frozen=True)
class PredictedRow:
    """A row of the table, predicted and measured."""

    id: str | None
    predicted_step_time_s: float | None
    measured_step_time_s: float | None
    predicted_tokens_s_gpu: float | None
    peak_memory_bytes: float | None
    compared_memory_bytes: float | None
    """The predicted figure that the measured one counts."""
    measured_memory_bytes: float | None
    assumed: tuple[str, ...]
    """Figures that the row does not state."""
    refused: str | None
    """The reason, where the row cannot be predicted."""


@dataclass(frozen=True)
class BacktestSummary:
    """The figures over all rows; None where no row has been measured."""

    rows: int
    predicted: int
    refused: int
    step_time_mape: float | None
    step_time_median_ape: float | None
    bias: float | None
    judged: int
    """Rows with a measured step time that count."""
    memory_mape: float | None
    memory_worst_under: float | None
    fitted: ErrorSummary | None
    """Step times of the sources that the shipped efficiencies were fitted to; None with other efficiencies."""
    unseen: ErrorSummary | None
    """Step times of all other sources."""
    refused_by_reason: dict[str, int]
    by_source: dict[str, ErrorSummary]
    by_model: dict[str, ErrorSummary]
    by_gpu: dict[str, ErrorSummary]
    sweeps: tuple[Ranking, ...]


@dataclass(frozen=True)
class BacktestReport:
    summary: BacktestSummary
    rows: tuple[PredictedRow, ...]


# The budget of a portfolio of runs over some years: buying machines, and renting them in three ways.


Way = Literal["owned", "on_demand", "reserved", "spot"]
WAYS: tuple[Way, ...] = ("owned", "on_demand", "reserved", "spot")


@dataclass(frozen=True)
class BudgetedRun:
    """One kind of run of the portfolio, as it is planned."""

    name: str
    per_year: tuple[float, ...]
    """How often it is made in each year."""
    devices: int
    wall_s: float
    spot_wall_s: float | None
    """Its time on devices that the cloud takes back now and then; None where it would never end."""
    tokens: float
    energy_joules: float
    usd: dict[str, float]
    """What one such run costs, by way: its share of all device-hours."""
    usd_per_million_tokens: dict[str, float]


@dataclass(frozen=True)
class BudgetYear:
    year: int
    """From 1."""
    device_hours: float
    fleet_devices: int
    """Devices that the year's runs take, at the utilisation that can be kept."""
    bought_devices: int
    sold_devices: int
    utilisation: float
    """The part of the fleet's hours in which a run uses them."""
    owned_usd: dict[str, float]
    """Cash of the year by cause; what a sale brings is negative."""
    usd: dict[str, float]
    """Cash of the year, by way."""


@dataclass(frozen=True)
class Sensitivity:
    """What the whole costs by each way where one input is at its bounds."""

    key: str
    low: float
    high: float
    low_usd: dict[str, float]
    high_usd: dict[str, float]


@dataclass(frozen=True)
class Budget:
    cluster: str
    accelerator: str
    runs: tuple[BudgetedRun, ...]
    years: tuple[BudgetYear, ...]
    usd: dict[str, float]
    """Of all years, by way; owned less what the machines are still worth at the end."""
    worth_usd: float
    """Value of the machines at the end: straight-line between price and resale."""
    break_even_months: float | None
    """After which buying has cost less cash than renting by the hour; None: not in `useful_years`."""
    break_even_utilisation: float | None
    """Use of a device, as a part of its life, above which buying costs less than renting by the hour; None: no use is
    enough."""
    cumulated_usd: dict[str, tuple[float, ...]]
    """Cash up to the end of each month, by way, from the beginning."""
    sensitivities: tuple[Sensitivity, ...]

    @property
    def cheapest(self) -> str:
        return min(self.usd, key=lambda way: self.usd[way])


# What `trainspec calibrate` has learned of a cluster.


@dataclass(frozen=True)
class Calibrated:
    """A parameter's factor over its shipped value."""

    factor: float
    low: float
    """Its bounds, nine in ten."""
    high: float
    informed: bool
    """False where the measurements say nothing of it, so that the shipped value stands."""


@dataclass(frozen=True)
class ClusterProfile:
    cluster: str
    """The cluster's name, as `cluster.name` says."""
    device: str
    """The accelerator, or the processor, on which was measured."""
    kind: str
    """gpu: the factors are of the planner's efficiencies; cpu: of a step's parts."""
    date: str
    rows: int
    """Measured steps that it was fitted to."""
    torch: str
    trainspec: str
    error_before: float
    """Mean error of the rows' step times by the shipped values, and"""
    error_after: float
    """by the fitted ones."""
    known_within: float
    """Other steps like these are known within this factor, nine in ten."""
    parameters: dict[str, Calibrated]

    @property
    def factors(self) -> dict[str, float]:
        return {name: found.factor for name, found in self.parameters.items()}

    @property
    def kept(self) -> list[str]:
        """Parameters that the measurements did not inform."""
        return [name for name, found in self.parameters.items() if not found.informed]


# Memory that ran out: with which setting, and which one was taken for it.


@dataclass(frozen=True)
class MemorySetting:
    """The settings that decide a step's peak memory and leave its result the same."""

    micro_batch_size: int
    """Samples of a rank that are processed together, at most."""
    recompute: Recompute
    offload: Offload

    def describe(self, before: MemorySetting | None = None) -> str:
        """`micro-batches of 4 samples`, `recompute=full`: what differs from `before`, or all of it."""
        words = {
            "micro_batch_size": f"micro-batches of {self.micro_batch_size} sample{'s' * (self.micro_batch_size > 1)}",
            "recompute": f"recompute={self.recompute}",
            "offload": f"offload={self.offload}",
        }
        differing = [name for name in words if before is None or getattr(self, name) != getattr(before, name)]
        return ", ".join(words[name] for name in differing)


@dataclass(frozen=True)
class Shortage:
    """The memory of a rank ran out."""

    failed: MemorySetting
    """The setting in force, with the samples of the micro-batch that failed."""
    layout: str
    """The axes of the layout in force, which a run may change between two steps."""
    used_bytes: int | None = None
    """Memory that the process held; None where nobody could ask."""
    limit_bytes: int | None = None
    """Memory that the process may hold."""
    was_killed: bool = False
    """The kernel killed a process; else an allocation failed."""


@dataclass(frozen=True)
class Relief:
    """A setting whose memory ran out, and the one that was taken for it."""

    failed: MemorySetting
    taken: MemorySetting
