"""A backtest of the planner: its errors over a table of measured runs. Errors are fractions: 0.1 is 10%."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


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
        size, signed = sorted(map(abs, errors)), sorted(errors)
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
