"""Peaks of a source whose rows no constant was fitted to."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import Prediction, backtest

TABLE = Path(__file__).parents[2] / "data" / "measured" / "memory_torchtitan.csv"


@pytest.fixture(scope="module")
def predictions() -> dict[str, Prediction]:
    with TABLE.open(newline="", encoding="utf-8") as lines:
        found = backtest(list(csv.DictReader(lines)), Efficiency()).predictions
    return {prediction.row["id"]: prediction for prediction in found}


def test_the_error_does_not_grow(predictions: dict[str, Prediction]) -> None:
    errors = [prediction.memory_error or 0.0 for prediction in predictions.values()]
    assert len(errors) == 18
    assert sum(map(abs, errors)) / len(errors) < 0.06
    assert max(errors) < 0.09


def test_ranks_of_context_parallelism_share_the_states(predictions: dict[str, Prediction]) -> None:
    """Eight ranks have the same tokens each, and the same parts of the state, however they divide a longer sequence."""
    for first, last in (("t7", "t10"), ("t15", "t18")):
        ratio = (predictions[last].memory_bytes or 0) / (predictions[first].memory_bytes or 1)
        assert ratio == pytest.approx(1.0, abs=0.02)


def test_a_pipeline_of_fsdp2_keeps_parameters_and_gradients_whole(predictions: dict[str, Prediction]) -> None:
    assert all(abs(predictions[name].memory_error or 0) < 0.09 for name in ("t13", "t14", "t15", "t16", "t17", "t18"))
