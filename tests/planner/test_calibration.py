"""What a few measured times leave of a prior: on made-up steps whose answer is known."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from trainspec_cli.planner.calibration import (
    NINE_IN_TEN,
    PACE,
    Observation,
    Spread,
    calibrated,
    choose,
    efficiency_with,
    infer,
    of_parts,
    of_rows,
    slopes_of,
)
from trainspec_cli.planner.hardware.rates import Efficiency
from trainspec_cli.planner.validation.backtest import backtest
from trainspec_cli.recipe.results.plan import LocalPrediction

# What a few measured times leave of a prior: on made-up steps whose answer is known


SPREAD = Spread(parameter=0.1, pace=0.1, group=0.0, noise=0.02)
NAMES = ("compute", "link", "unused")


def step_s(compute_s: float, link_s: float, factors: Mapping[str, float]) -> float:
    parts = compute_s * factors.get("compute", 1.0) + link_s * factors.get("link", 1.0)
    return parts * factors.get(PACE, 1.0)


def run(compute_s: float, link_s: float, measured_s: float, group: str = "") -> Observation:
    return Observation(lambda factors: step_s(compute_s, link_s, factors), measured_s, group or f"{compute_s} {link_s}")


def test_what_the_runs_tell_apart_is_found() -> None:
    wide = Spread(parameter=0.5, pace=0.01, group=0.0, noise=0.01)
    found = infer([run(1.0, 0.1, 1.0 * 1.2 + 0.1 * 0.8), run(0.1, 1.0, 0.1 * 1.2 + 1.0 * 0.8)], NAMES, wide)
    assert found.factors["compute"] == pytest.approx(1.2, rel=0.02)
    assert found.factors["link"] == pytest.approx(0.8, rel=0.02)


def test_a_parameter_that_no_run_depends_on_keeps_its_prior_and_is_named() -> None:
    found = infer([run(1.0, 0.5, 2.0)], NAMES, SPREAD)
    place = found.names.index("unused")
    assert found.means[place] == 0.0
    assert found.deviations[place] == pytest.approx(SPREAD.parameter)
    assert not found.informed[place] and found.informed[0]


def test_runs_of_one_group_move_less_than_as_many_of_others() -> None:
    spread = Spread(parameter=0.1, pace=0.1, group=0.1, noise=0.02)
    alike = infer([run(1.0, 0.0, 1.2, "a") for _ in range(4)], NAMES, spread)
    others = infer([run(1.0, 0.0, 1.2, str(number)) for number in range(4)], NAMES, spread)
    assert sum(alike.means) < 0.95 * sum(others.means)
    assert alike.deviations[-1] > others.deviations[-1]


def test_one_wild_run_steers_little() -> None:
    sane = [run(1.0, 0.0, 1.0, str(number)) for number in range(5)]
    found = infer([*sane, run(1.0, 0.0, 5.0, "wild")], NAMES, SPREAD)
    assert sum(found.means) < 0.05


def test_intervals_hold_what_they_say() -> None:
    """300 clusters drawn from the prior; nine in ten of the intervals hold the cluster's own compute factor."""
    draw, held = random.Random(7), 0
    for _ in range(300):
        true = {name: math.exp(draw.gauss(0, 0.1)) for name in (*NAMES, PACE)}
        sizes = [(1.0, 0.1), (0.3, 1.0), (1.0, 0.5)]
        runs = [run(c, n, step_s(c, n, true) * math.exp(draw.gauss(0, SPREAD.noise))) for c, n in sizes]
        found = infer(runs, NAMES, SPREAD)
        held += abs(found.means[0] - math.log(true["compute"])) < NINE_IN_TEN * found.deviations[0]
    assert 0.85 < held / 300 < 0.95


def test_trials_that_differ_are_chosen_first() -> None:
    """Two bound by compute and one by its link: the second to be run is the other kind."""
    slopes = [slopes_of([run(c, n, 1.0)], NAMES) for c, n in ((1.0, 0.01), (1.0, 0.02), (0.01, 1.0))]
    assert set(choose(slopes, SPREAD, 2)) in ({0, 2}, {1, 2})
    assert len(choose(slopes, SPREAD, 9)) == 3


def test_slopes_are_the_shares_of_a_step() -> None:
    slopes = slopes_of([run(3.0, 1.0, 4.0)], NAMES)
    assert np.allclose(slopes, [[0.75, 0.25, 0.0, 1.0]], atol=0.01)


# The pace multiplies a planned step, whatever bounds it


TABLE = Path(__file__).parents[1] / "data" / "measured" / "throughput.csv"
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
