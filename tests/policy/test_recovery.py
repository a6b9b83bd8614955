"""Who steps on after a failure, and what is lost."""

import math

import pytest

from trainspec_cli.policy.recovery import (
    capacity,
    decide,
    durations,
    enough_groups,
    lost_work_s,
    may_restart,
    pause_s,
    rollback_mtbf_s,
)
from trainspec_cli.spec.recipe.reliability import ReliabilitySpec
from trainspec_cli.spec.recipe.resilience import ResilienceSpec

RESTART = ResilienceSpec(mode="restart")
ELASTIC = ResilienceSpec(mode="elastic", min_groups=2)


@pytest.mark.parametrize(
    ("resilience", "surviving_groups", "job_wide", "action"),
    [
        (RESTART, 7, False, "restart"),
        (ELASTIC, 7, False, "shrink"),
        (ELASTIC, 2, False, "shrink"),
        (ELASTIC, 1, False, "wait"),
        (ELASTIC, 0, False, "restart"),
        (ELASTIC, 7, True, "restart"),
    ],
)
def test_decide(resilience: ResilienceSpec, surviving_groups: int, job_wide: bool, action: str) -> None:
    assert decide(resilience, surviving_groups, job_wide) == action


def test_a_restart_loses_all_since_the_checkpoint_and_a_shrink_the_step_alone() -> None:
    assert lost_work_s("restart", since_checkpoint_s=900, since_step_s=4) == 900
    assert lost_work_s("shrink", since_checkpoint_s=900, since_step_s=4) == 4
    assert lost_work_s("wait", since_checkpoint_s=900, since_step_s=4) == 4


def test_groups_that_are_away_take_their_share_of_the_rate() -> None:
    assert capacity(active_groups=6, replica_groups=8) == 0.75


def test_healing_takes_as_long_as_copying_the_state() -> None:
    takes = durations(ReliabilitySpec(heal_gb_per_s=5), state_bytes_per_device=50e9, load_s=30)
    assert takes.heal_s == pytest.approx(10)
    assert takes.restart_s - takes.group_return_s == pytest.approx(30 - 10)


def test_an_elastic_run_goes_back_to_a_checkpoint_only_after_job_wide_failures() -> None:
    cluster = ReliabilitySpec(job_wide_fraction=0.1)
    assert rollback_mtbf_s(RESTART, cluster, 1000, replica_groups=8) == 1000
    assert rollback_mtbf_s(ELASTIC, cluster, 1000, replica_groups=8) == pytest.approx(10_000)
    assert rollback_mtbf_s(ELASTIC, cluster, 1000, replica_groups=1) == 1000
    assert math.isinf(rollback_mtbf_s(ELASTIC, ReliabilitySpec(job_wide_fraction=0), 1000, replica_groups=8))


def test_restarts_are_bounded_by_the_hour() -> None:
    resilience = ResilienceSpec(max_restarts_per_hour=2)
    assert may_restart(resilience, [], now_s=0)
    assert not may_restart(resilience, [10, 20], now_s=3600)
    assert may_restart(resilience, [10, 20], now_s=3611)
    assert not may_restart(ResilienceSpec(mode="none"), [], now_s=0)


def test_what_worked_starts_again_at_once_and_what_does_not_ever_later() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 4)] == [0, 1, 2, 4]
    assert pause_s(50) == 60


def test_the_run_goes_on_down_to_the_least_number_of_groups() -> None:
    assert enough_groups(ELASTIC, 2)
    assert not enough_groups(ELASTIC, 1)
