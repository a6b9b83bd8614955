"""The chance to fit rests on the error of published runs: what stands in `memory/predict.py` is counted from them."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from pathlib import Path
from statistics import fmean, pvariance, variance

import pytest

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.memory.predict import LOG_BIAS, LOG_DEVIATION, expected_step_s, fit_probability
from trainspec_cli.planner.validation.backtest import backtest

MEASURED = Path(__file__).parents[2] / "data" / "measured"
BY_FORMULA, CONTRADICTED = "Korthikanti", "m43"
"""Activations that a paper computes, and a run that its neighbour contradicts (test_backtest.py)."""


def log_errors() -> dict[str, list[float]]:
    """Return ln(measured / predicted) of the measured peaks, by source."""
    tables = []
    for name in ("memory.csv", "memory_corrections.csv"):
        with (MEASURED / name).open(newline="", encoding="utf-8") as lines:
            tables.append(list(csv.DictReader(lines)))
    rows, corrections = tables[0], {row["id"]: row for row in tables[1]}
    found = defaultdict(list)
    for one in backtest([row | corrections.get(row["id"], {}) for row in rows], Efficiency()).predictions:
        if one.memory_error is not None and BY_FORMULA not in one.row["source"] and one.row["id"] != CONTRADICTED:
            found[one.row["source"]].append(-math.log1p(one.memory_error))
    return found


def test_bias_and_deviation_are_those_of_the_measured_peaks() -> None:
    """A run of a new source: the variance within sources, and that of a source's mean about the mean of them."""
    sources = log_errors()
    assert (len(sources), sum(map(len, sources.values()))) == (3, 135)
    means = [fmean(errors) for errors in sources.values()]
    between = variance(means) * (1 + 1 / len(means))
    within = fmean(pvariance(errors) for errors in sources.values())
    assert fmean(means) == pytest.approx(LOG_BIAS, abs=5e-4)
    assert math.sqrt(within + between) == pytest.approx(LOG_DEVIATION, abs=5e-4)


def test_the_chance_covers_what_was_measured() -> None:
    """Of the runs, as many exceed a limit as the formula says, or somewhat fewer."""
    errors = [error for of_source in log_errors().values() for error in of_source]
    for room in (0.97, 1.0, 1.03, 1.06):
        exceeding = sum(error > math.log(room) for error in errors) / len(errors)
        assert exceeding <= 1 - fit_probability(1.0, room) + 0.02


def test_less_memory_fits_more_probably() -> None:
    chances = [fit_probability(peak, 100.0) for peak in (80.0, 90.0, 95.0, 98.0, 100.0, 104.0, 120.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[0] > 0.9999 and 0.9 < chances[3] < 0.93 and chances[-1] < 0.001
    assert fit_probability(100.0, 100.0 * math.exp(LOG_BIAS)) == pytest.approx(0.5)


def test_what_does_not_fit_costs_a_start_and_a_forward_more() -> None:
    assert expected_step_s(3.0, 1.0, 100.0) == 3.0
    assert expected_step_s(3.0, 0.0, 0.5) == 3.0 + 1.0 + 0.5
    assert expected_step_s(3.0, 0.9, 0.5) == pytest.approx(3.15)
