"""Measured steps as observations: of GPUs by the planner's efficiencies, of a CPU by the parts of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainspec_cli.plan.calibration.posterior import PACE, Observation, Spread
from trainspec_cli.plan.hardware.rates import FRACTIONS, Efficiency
from trainspec_cli.plan.setup import Setup
from trainspec_cli.plan.time.step import estimate_step
from trainspec_cli.recipe.results.prediction import LocalPrediction

if TYPE_CHECKING:
    from trainspec_cli.plan.validation.backtest import Prediction

EFFICIENCIES = tuple(Efficiency().as_dict())
PARTS = ("forward", "backward", "exposed_comm", "optimizer", "other")
"""Parts of a step on a CPU that a probe predicts."""
RATES = (
    *("matmul", "matmul_fp8", "matmul_fp4", "memory"),
    *("link_nvswitch", "link_mesh", "link_pcie", "nic"),
)
TIMES = (
    *("kernel_s", "launch_s", "collective_latency_s", "hop_latency_s", "step_s", "step_graphed_s"),
    *("exponentials", "issue"),
)
"""All rates divided, and all times multiplied, by a number multiply a step by it: the rest are shares of these."""
GPU_SPREAD = Spread(parameter=0.1, pace=0.08, group=0.09, noise=0.05)
"""Of other sources than were fitted to, 91% lie in the intervals of nine in ten (tests/bench/calibration.py)."""
CPU_SPREAD = Spread(parameter=0.3, pace=0.3, group=0.05, noise=0.05)
"""Steps of CPUs are taken to err by a third, with neighbours' load; runs of one layout differ by 5%."""
LEAST_SHARE = 0.02
"""Parts of a step below this share are noise to a calibration."""
LARGEST = 0.98


def efficiency_with(factors: Mapping[str, float], start: Efficiency) -> Efficiency:
    """Return `start` with its parameters changed by their factors, and the step by the pace."""
    values, pace = start.as_dict(), factors.get(PACE, 1.0)
    for name in values:
        value = values[name] * factors.get(name, 1.0)
        values[name] = min(value, max(LARGEST, values[name])) if name in FRACTIONS else value
    for name in RATES:
        values[name] /= pace
    for name in TIMES:
        values[name] *= pace
    return Efficiency(**values)


def of_setup(setup: Setup, measured_s: float, group: str, start: Efficiency) -> Observation:
    """Return the observation of a whole step on GPUs."""
    return Observation(lambda factors: estimate_step(setup, efficiency_with(factors, start)).total_s, measured_s, group)


def of_rows(predictions: Sequence[Prediction], start: Efficiency) -> list[Observation]:
    """Return the observations of a table's measured rows; those of one model and format are a group."""
    return [
        of_setup(run.setup, run.measured_step_time_s, f"{run.row.get('model')} {run.setup.matmul}", start)
        for run in predictions
        if run.judged and run.setup and run.measured_step_time_s
    ]


def of_parts(predicted: LocalPrediction, measured: Mapping[str, float] | None, group: str) -> list[Observation]:
    """Return the observations of a step's parts on a CPU; without `measured`, as they are predicted."""
    found, whole_s = [], predicted.step_time_s
    for part in PARTS:
        own_s = predicted.time_s.get(part, 0.0)
        took_s = own_s if measured is None else measured.get(part, 0.0)
        if own_s > LEAST_SHARE * whole_s and took_s > 0:
            found.append(Observation(_times(part, own_s), took_s, group))
    return found


def _times(part: str, seconds: float):  # type: ignore[no-untyped-def]
    return lambda factors: seconds * factors.get(part, 1.0) * factors.get(PACE, 1.0)


def calibrated(predicted: LocalPrediction, factors: Mapping[str, float]) -> LocalPrediction:
    """Return the prediction with its parts as this machine was measured to take them."""
    pace = factors.get(PACE, 1.0)
    parts = {part: seconds * factors.get(part, 1.0) * pace for part, seconds in predicted.time_s.items()}
    return replace(predicted, time_s=parts)
