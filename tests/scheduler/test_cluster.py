"""What the steps of a disturbed cluster take: who waits for whom."""

import numpy as np
import pytest
from scheduler.jobs import NONE, job_of, parts_of

from trainspec_cli.planner.time.samples import StageTime
from trainspec_cli.policy.speeds import Speed
from trainspec_cli.scheduler.cluster import Cluster
from trainspec_cli.scheduler.disturbance import Event, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.spec.recipe.layout import Layout


def step_s(cluster: Cluster, *events: Event, samples: float = 4, micro_batches: float = 4) -> float:
    division = np.full((2, cluster.ranks), (samples,)) * [[1.0], [micro_batches / samples]]
    return cluster.seconds(cluster.condition(events), *division).total_s


def test_all_wait_for_a_slow_device() -> None:
    cluster = job_of().cluster
    assert step_s(cluster) == pytest.approx(4 * 1.0 + 0.2 + 0.05)
    assert step_s(cluster, SlowDevice(device=5, factor=2)) == pytest.approx(8 * 1.0 + 0.2 + 0.05)


def test_ranks_in_step_wait_for_the_slowest_in_each_micro_batch() -> None:
    """A micro-batch takes 0.1 s and 0.9 s a sample. The slow rank has one sample in the first two of four turns, and
    none in the others; of the others half have two in the first turn and one in the rest."""
    cluster = job_of().cluster
    slow = cluster.condition([SlowDevice(device=5, factor=4)])
    division = np.array([[5.0] * 4 + [4.0] * 4, [4.0] * 8])
    division[0, 5] = 2.0
    passes_s = [4.0, 4.0, 1.0, 1.0]
    assert cluster.seconds(slow, *division, in_step=True).total_s == pytest.approx(sum(passes_s) + 0.25)
    division[0, 5] = 0.0
    passes_s = [1.9, 1.0, 1.0, 1.0]
    assert cluster.seconds(slow, *division, in_step=True).total_s == pytest.approx(sum(passes_s) + 0.25)


def test_what_is_slow_twice_is_slower_yet() -> None:
    events = SlowDevice(device=5, factor=2), SlowNode(node=0, factor=1.5)
    assert step_s(job_of().cluster, *events) == pytest.approx(4 * 3.0 + 0.25)


def test_a_pipeline_is_as_slow_as_its_slowest_stage_and_waits_for_the_others_once() -> None:
    cluster = job_of(ranks=4, pp=2).cluster
    assert step_s(cluster) == pytest.approx(4 + 1 + 0.25)
    assert step_s(cluster, SlowDevice(device=6, factor=3)) == pytest.approx(12 + 1 + 0.25)


def test_devices_are_counted_as_ranks_are_laid_out() -> None:
    """tp innermost, pp outermost: device 13 of pp 2 x dp 4 x tp 2 is the second stage of data-parallel rank 2."""
    cluster = job_of(ranks=4, pp=2, tp=2).cluster
    slow = cluster.condition([SlowDevice(device=13, factor=2)]).compute
    assert slow.tolist() == [[1, 1, 1, 1], [1, 1, 2, 1]]


def test_devices_of_replica_groups_lie_one_group_after_the_other() -> None:
    cluster = job_of(ranks=4, pp=2, replica_groups=2).cluster
    slow = cluster.condition([SlowDevice(device=5, factor=2)]).compute
    assert slow.tolist() == [[1, 1, 1, 2], [1, 1, 1, 1]]


def test_a_narrow_network_holds_up_all_that_crosses_it() -> None:
    cluster = job_of().cluster
    assert step_s(cluster, NarrowLink(node=0, factor=4)) == pytest.approx(4 + 0.8 + 0.05)
    assert step_s(cluster, NarrowLink(node=0, tier="scaleup", factor=4)) == pytest.approx(step_s(cluster))


def test_narrow_links_inside_a_node_slow_the_ranks_that_exchange_in_layers_over_them() -> None:
    stage = StageTime(Speed(0.1, 0.9), Speed(0.0, 0.5), NONE, 0.0)
    cluster = job_of(parts=parts_of(stages=(stage,))).cluster
    assert step_s(cluster) == pytest.approx(4 * 1.5 + 0.25)
    assert step_s(cluster, NarrowLink(node=0, tier="scaleup", factor=3)) == pytest.approx(4 * 2.5 + 0.25)


def test_a_stage_is_never_faster_than_its_kernels_are_launched() -> None:
    cluster = job_of(parts=parts_of(launch_s=1.5)).cluster
    assert step_s(cluster) == pytest.approx(4 * 1.5 + 0.25)
    assert step_s(cluster, SlowDevice(device=0, factor=2)) == pytest.approx(4 * 2.0 + 0.25)


def test_ranks_that_share_experts_wait_for_the_slowest_of_them() -> None:
    cluster = Cluster(parts_of(), Layout(dp_shard=8, ep=4), 1, 8, 1)
    seconds = cluster.seconds(cluster.condition([SlowDevice(device=5, factor=2)]), *np.full((2, 8), 4.0))
    assert seconds.passes_s.tolist() == [[4.0] * 4 + [8.0] * 4]


def test_more_samples_for_one_rank_take_longer_by_its_own_speed() -> None:
    cluster = job_of(ranks=4).cluster
    counts = np.array([1.0, 5, 5, 5])
    seconds = cluster.seconds(cluster.condition([SlowDevice(device=0, factor=2)]), counts, np.full(4, 5.0))
    assert seconds.ranks_s == pytest.approx([2 * (0.5 + 0.9), 5.0, 5.0, 5.0])
