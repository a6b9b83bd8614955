"""The pace multiplies a planned step, whatever bounds it."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trainspec_cli.planner.calibration import PACE, calibrated, efficiency_with, of_parts, of_rows
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import backtest
from trainspec_cli.recipe.results.plan import LocalPrediction

TABLE = Path(__file__).parents[2] / "data" / "measured" / "throughput.csv"
PREDICTED = LocalPrediction({"forward": 0.2, "backward": 0.4, "optimizer": 0.001, "other": 0.1}, {})


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("place", [0, 60, 300, 500, 800, 1100])
def test_the_pace_multiplies_every_step(rows: list[dict[str, str]], place: int) -> None:
    predicted = backtest(rows[place : place + 1], Efficiency()).predictions
    for observation in of_rows(predicted, Efficiency()):
        assert observation.seconds_of({PACE: 1.25}) == pytest.approx(1.25 * observation.seconds_of({}), rel=0.01)


def test_no_share_passes_what_there_is() -> None:
    found = efficiency_with({"dp_overlap": 3.0, "memory": 2.0}, Efficiency())
    assert (found.dp_overlap, found.memory) == (0.98, 0.98)


def test_parts_next_to_nothing_say_nothing() -> None:
    observations = of_parts(PREDICTED, {"forward": 0.3, "backward": 0.6, "optimizer": 9.0, "other": 0.1}, "run")
    assert [one.measured_s for one in observations] == [0.3, 0.6, 0.1]


def test_a_calibrated_prediction_has_each_part_as_measured() -> None:
    found = calibrated(PREDICTED, {"forward": 1.5, PACE: 2.0})
    assert found.time_s == pytest.approx({"forward": 0.6, "backward": 0.8, "optimizer": 0.002, "other": 0.2})
    assert found.memory == PREDICTED.memory
