"""A backtest of the planner: its errors on a table of measured runs. Errors are fractions: 0.1 is 10%."""

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
    """90% of predictions are within this factor of the measurement."""

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
    """A sweep: runs from one source with the same model and machine but different layouts."""

    source: str
    model: str
    gpu: str
    layouts: int
    loss: float
    """Slowdown of the layout predicted to be fastest relative to the actual fastest one, as a fraction of measured
    times."""


@dataclass(frozen=True)
class PredictedRow:
    """A table row with its prediction and its measurement."""

    id: str | None
    predicted_step_time_s: float | None
    measured_step_time_s: float | None
    predicted_tokens_s_gpu: float | None
    peak_memory_bytes: float | None
    compared_memory_bytes: float | None
    """The predicted value that corresponds to the measured one."""
    measured_memory_bytes: float | None
    assumed: tuple[str, ...]
    """Values that the row does not state and that were therefore assumed."""
    refused: str | None
    """Why the row cannot be predicted; None if it can."""


@dataclass(frozen=True)
class BacktestSummary:
    """The statistics over all rows; None if no row has been measured."""

    rows: int
    predicted: int
    refused: int
    step_time_mape: float | None
    step_time_median_ape: float | None
    bias: float | None
    judged: int
    """Number of rows that count: those with a measured step time."""
    memory_mape: float | None
    memory_worst_under: float | None
    fitted: ErrorSummary | None
    """Errors in step time for the sources used to fit the shipped efficiencies; None with other efficiencies."""
    unseen: ErrorSummary | None
    """Errors in step time for all other sources."""
    refused_by_reason: dict[str, int]
    by_source: dict[str, ErrorSummary]
    by_model: dict[str, ErrorSummary]
    by_gpu: dict[str, ErrorSummary]
    sweeps: tuple[Ranking, ...]


@dataclass(frozen=True)
class BacktestReport:
    summary: BacktestSummary
    rows: tuple[PredictedRow, ...]


# The budget of a portfolio of runs over several years: buying machines, and three ways of renting them.


Way = Literal["owned", "on_demand", "reserved", "spot"]
WAYS: tuple[Way, ...] = ("owned", "on_demand", "reserved", "spot")


@dataclass(frozen=True)
class BudgetedRun:
    """One kind of run in the portfolio, as planned."""

    name: str
    per_year: tuple[float, ...]
    """Number of such runs in each year."""
    devices: int
    wall_s: float
    spot_wall_s: float | None
    """Its wall time on devices that the cloud may reclaim; None if it would never end."""
    tokens: float
    energy_joules: float
    usd: dict[str, float]
    """Cost of one such run for each way of buying or renting, based on its fraction of all device-hours."""
    usd_per_million_tokens: dict[str, float]


@dataclass(frozen=True)
class BudgetYear:
    year: int
    """Counted from 1."""
    device_hours: float
    fleet_devices: int
    """Number of devices needed for the year's runs, at the achievable utilisation."""
    bought_devices: int
    sold_devices: int
    utilisation: float
    """Fraction of the fleet's device-hours that is used by runs."""
    owned_usd: dict[str, float]
    """The year's cash costs by cause; income from a sale is negative."""
    usd: dict[str, float]
    """The year's cash costs for each way of buying or renting."""


@dataclass(frozen=True)
class Sensitivity:
    """Total cost for each way of buying or renting, with one input at its bounds."""

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
    """Total over all years for each way of buying or renting; for owned machines, minus their final value."""
    worth_usd: float
    """Value of the machines at the end, interpolated linearly between purchase and resale price."""
    break_even_months: float | None
    """Number of months after which buying has cost less than renting by the hour; None: not within `useful_years`."""
    break_even_utilisation: float | None
    """Utilisation of a device over its life above which buying costs less than renting by the hour; None: never."""
    cumulated_usd: dict[str, tuple[float, ...]]
    """Cumulative cash costs at the end of each month, for each way of buying or renting."""
    sensitivities: tuple[Sensitivity, ...]

    @property
    def cheapest(self) -> str:
        return min(self.usd, key=lambda way: self.usd[way])


# The results of `trainspec calibrate` for a cluster.


@dataclass(frozen=True)
class Calibrated:
    """A parameter's factor relative to its shipped value."""

    factor: float
    low: float
    """Its 90% bounds."""
    high: float
    informed: bool
    """True if the measurements contain information about it; if not, the shipped value is kept."""


@dataclass(frozen=True)
class ClusterProfile:
    cluster: str
    """The cluster's name (`cluster.name`)."""
    device: str
    """The measured accelerator or processor."""
    kind: str
    """gpu: factors on the planner's efficiencies; cpu: factors on the parts of a step."""
    date: str
    rows: int
    """Number of measured steps used in the fit."""
    torch: str
    trainspec: str
    error_before: float
    """Mean error of the predicted step times with the shipped values."""
    error_after: float
    """Mean error of the predicted step times with the fitted values."""
    known_within: float
    """90% of similar steps are predicted within this factor."""
    parameters: dict[str, Calibrated]

    @property
    def factors(self) -> dict[str, float]:
        return {name: found.factor for name, found in self.parameters.items()}

    @property
    def kept(self) -> list[str]:
        """Return the parameters about which the measurements contain no information."""
        return [name for name, found in self.parameters.items() if not found.informed]


# Running out of memory: the setting that failed, and the setting that replaced it.


@dataclass(frozen=True)
class MemorySetting:
    """The settings that determine a step's peak memory without changing its result."""

    micro_batch_size: int
    """Maximum number of samples that a rank processes together."""
    recompute: Recompute
    offload: Offload

    def describe(self, before: MemorySetting | None = None) -> str:
        """Return text such as `micro-batches of 4 samples`, `recompute=full`: the differences from `before`, or
        everything."""
        words = {
            "micro_batch_size": f"micro-batches of {self.micro_batch_size} sample{'s' * (self.micro_batch_size > 1)}",
            "recompute": f"recompute={self.recompute}",
            "offload": f"offload={self.offload}",
        }
        differing = [name for name in words if before is None or getattr(self, name) != getattr(before, name)]
        return ", ".join(words[name] for name in differing)


@dataclass(frozen=True)
class Shortage:
    """A rank ran out of memory."""

    failed: MemorySetting
    """The active setting, with the number of samples in the micro-batch that failed."""
    layout: str
    """The axes of the active layout, which may change between steps."""
    used_bytes: int | None = None
    """Memory that the process was using; None if unknown."""
    limit_bytes: int | None = None
    """Memory that the process is allowed to use."""
    was_killed: bool = False
    """True if the kernel killed a process; False if an allocation failed."""


@dataclass(frozen=True)
class Relief:
    """A setting that made a run exceed its memory, and the setting that replaced it."""

    failed: MemorySetting
    taken: MemorySetting
