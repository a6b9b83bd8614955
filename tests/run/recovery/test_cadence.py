"""The checkpoint interval against the papers' own claims, and against brute force."""

import math

import pytest

from trainspec_cli.run.recovery.reliability import (
    PRIOR_WEIGHT,
    auto_interval_s,
    checkpoint_interval_s,
    checkpoint_interval_steps,
    daly_interval_s,
    updated_mtbf_s,
    young_interval_s,
)


def expected_efficiency(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the exact useful fraction of the time of a run that restarts on every failure (Daly 2006, eq. 20).

    interval / (M e^(R/M) (e^((interval + C)/M) - 1)), for failures without memory, which occur during checkpoints and
    restarts too. `restart_s` (R) is the time from a failure to the first new work.
    """
    wall_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + checkpoint_s) / mtbf_s)
    return interval_s / wall_s


def test_young_is_the_root_of_two_c_m() -> None:
    assert young_interval_s(checkpoint_s=50, mtbf_s=10_000) == pytest.approx(1000)


@pytest.mark.parametrize("mtbf_s", [600.0, 11_000.0, 1e6])
@pytest.mark.parametrize("checkpoint_part", [0.001, 0.01, 0.1])
def test_daly_loses_hardly_more_than_the_best_interval(mtbf_s: float, checkpoint_part: float) -> None:
    checkpoint_s = checkpoint_part * mtbf_s
    tried = [mtbf_s * 1.01**power for power in range(-900, 200)]
    best = max(expected_efficiency(interval_s, checkpoint_s, 60, mtbf_s) for interval_s in tried)
    daly = expected_efficiency(daly_interval_s(checkpoint_s, mtbf_s), checkpoint_s, 60, mtbf_s)
    assert daly >= best * 0.9999


def test_daly_approaches_young_where_checkpoints_are_cheap() -> None:
    assert daly_interval_s(1e-3, 1e6) == pytest.approx(young_interval_s(1e-3, 1e6), rel=1e-4)


def test_daly_by_its_formula() -> None:
    """C / 2M is 0.04, its root 0.2; the first order gives 40."""
    assert daly_interval_s(checkpoint_s=8, mtbf_s=100) == pytest.approx(40 * (1 + 0.2 / 3 + 0.04 / 9) - 8)


def test_efficiency_without_failures_and_with_restarts_as_long_as_the_time_between_them() -> None:
    assert expected_efficiency(90, 10, restart_s=5, mtbf_s=1e9) == pytest.approx(0.9, rel=1e-6)
    long, none = (expected_efficiency(90, 10, restart_s, mtbf_s=1000) for restart_s in (1000, 0))
    assert none / long == pytest.approx(math.e)
    assert none == pytest.approx(0.09 / (math.exp(0.1) - 1))


def test_checkpoints_dearer_than_two_failures_are_written_once_a_failure() -> None:
    assert daly_interval_s(checkpoint_s=500, mtbf_s=200) == 200


def test_without_failures_no_checkpoint_pays() -> None:
    assert math.isinf(daly_interval_s(10, math.inf))


def test_a_checkpoint_is_whole_before_the_next_begins() -> None:
    assert checkpoint_interval_s(blocked_s=0.01, written_s=300, mtbf_s=3600) == 300


def test_auto_is_the_best_interval_up_to_ten_minutes_or_to_a_twentieth_of_the_time_waited() -> None:
    assert auto_interval_s(1.0, 2.0, 3600.0) == daly_interval_s(1.0, 3600.0) < 600
    assert auto_interval_s(0.001, 2.0, 3600.0) == 60
    assert auto_interval_s(1.0, 2.0, math.inf) == 600
    assert auto_interval_s(45.0, 60.0, math.inf) == 900
    assert auto_interval_s(0.1, 700.0, math.inf) == 700, "one is whole before the next begins"


@pytest.mark.parametrize(("interval_s", "steps"), [(100, 10), (104, 10), (3, 1)])
def test_the_interval_is_whole_steps_and_at_least_one(interval_s: float, steps: int) -> None:
    assert checkpoint_interval_steps(interval_s, step_time_s=10) == steps


def test_where_nothing_fails_none_is_due_after_the_first():
    assert checkpoint_interval_steps(checkpoint_interval_s(1.0, 2.0, math.inf), 0.5) > 10**9


def test_failures_that_were_seen_outweigh_the_expected_rate_the_more_of_them_there_are() -> None:
    assert updated_mtbf_s(3600.0, 0, 1e9) == 3600.0
    assert updated_mtbf_s(1e9, 1, 120.0) == pytest.approx(1e9 * (120 / 1e9) ** (1 / (1 + PRIOR_WEIGHT)))
    by_count = [updated_mtbf_s(1e9, count, 120.0 * count) for count in (1, 2, 10, 100)]
    assert by_count == sorted(by_count, reverse=True)
    assert by_count[-1] == pytest.approx(120.0, rel=0.05)
    assert updated_mtbf_s(math.inf, 2, 240.0) == 120.0
