"""How often a job fails, how long it takes to come back, and what is lost."""

import math

import pytest

from trainspec_cli.recipe.keys.cluster import ReliabilitySpec
from trainspec_cli.recipe.keys.resilience import ResilienceSpec
from trainspec_cli.run.recovery.reliability import durations, job_mtbf_s, rollback_mtbf_s

RESTART = ResilienceSpec(mode="restart")
ELASTIC = ResilienceSpec(mode="elastic", min_groups=2)


def test_healing_takes_as_long_as_copying_the_state() -> None:
    takes = durations(ReliabilitySpec(heal_gb_per_s=5), state_bytes_per_device=50e9, load_s=30)
    assert takes.heal_s == pytest.approx(10)
    assert takes.restart_s - takes.group_return_s == pytest.approx(30 - 10)


def test_each_way_back_takes_its_own_times() -> None:
    spec = ReliabilitySpec(detect_s=1, swap_s=20, start_s=300, heal_gb_per_s=2)
    takes = durations(spec, state_bytes_per_device=8e9, load_s=5000)
    assert (takes.restart_s, takes.group_return_s) == (5321, 325)


def test_twice_the_devices_fail_twice_as_often() -> None:
    cluster = ReliabilitySpec(mtbf_device_hours=100)
    assert [job_mtbf_s(cluster, devices) for devices in (1, 50, 100)] == [360_000, 7200, 3600]


def test_an_elastic_run_goes_back_to_a_checkpoint_only_after_job_wide_failures() -> None:
    cluster = ReliabilitySpec(job_wide_fraction=0.1)
    assert rollback_mtbf_s(RESTART, cluster, 1000, replica_groups=8) == 1000
    assert rollback_mtbf_s(ELASTIC, cluster, 1000, replica_groups=8) == pytest.approx(10_000)
    assert rollback_mtbf_s(ELASTIC, cluster, 1000, replica_groups=1) == 1000
    assert math.isinf(rollback_mtbf_s(ELASTIC, ReliabilitySpec(job_wide_fraction=0), 1000, replica_groups=8))
