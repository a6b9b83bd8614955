"""What the steps of a disturbed cluster take: who waits for whom."""

import numpy as np
import pytest
from balance.jobs import NONE, job_of, parts_of

from trainspec_cli.balance.cluster import Cluster
from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.balance.disturbance import Event, NarrowLink, SlowDevice, SlowNode
from trainspec_cli.planner.time.samples import StageTime
from trainspec_cli.recipe.keys.layout import Layout


def step_s(cluster: Cluster, *events: Event, samples: float = 4, micro_batches: float = 4) -> float:
    division = np.full((2, cluster.ranks), (samples,)) * [[1.0], [micro_batches / samples]]
    return cluster.seconds(cluster.condition(events), *division).total_s


def test_all_wait_for_a_slow_device() -> None:
    cluster = job_of().cluster
    assert step_s(cluster) == pytest.approx(4 * 1.0 + 0.2 + 0.05)
    assert step_s(cluster, SlowDevice(device=5, factor=2)) == pytest.approx(8 * 1.0 + 0.2 + 0.05)


def test_ranks_in_step_wait_for_the_slowest_in_each_micro_batch() -> None:
    """A micro-batch takes 0.1 s and 0.9 s per sample. The slow rank has one sample in the first two of four turns, and
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


def test_a_rank_measures_its_own_computing_without_exchanges_and_waits() -> None:
    """Exchanges of tokens take 0.5 s a sample, and four ranks wait for the slow one among them."""
    stage = StageTime(Speed(0.1, 0.9), Speed(0.0, 0.5), NONE, 0.0)
    cluster = Cluster(parts_of(stages=(stage,), gradients_once_s=0.2), Layout(dp_shard=8, ep=4), 1, 8, 1)
    events = [SlowDevice(device=5, factor=2), NarrowLink(node=0, tier="scaleup", factor=3)]
    seconds = cluster.seconds(cluster.condition(events), *np.full((2, 8), 4.0))
    assert seconds.computed_s.tolist() == [[4.0] * 5 + [8.0] + [4.0] * 2]
    assert seconds.passes_s[0] == pytest.approx([10.0] * 4 + [14.0] * 4)
    # Of the ranks 0 to 3 each exchanges for 6 s; rank 5 does so too, and its neighbours also wait for it.
    assert seconds.waited_s(slice(0, 8)) == pytest.approx(6.2)


@pytest.mark.parametrize(
    ("layout", "seconds"), [(Layout(dp_replicate=2), 4 * 2 + 2 * 0.5), (Layout(dp_shard=2), 10.0 + 2 * 0.5)]
)
def test_a_slow_device_updates_slowly_and_others_wait_for_that_if_they_gather_parameters(
    layout: Layout, seconds: float
) -> None:
    """The slow rank has 4 s of passes and 0.5 s of the update at twice the time, the other 10 s and 0.5 s."""
    cluster = Cluster(parts_of(optimizer_s=0.5, gradients_once_s=0.0, rest_s=0.0), layout, 1, 2, 1)
    slow = cluster.condition([SlowDevice(device=0, factor=2)])
    counts = np.array([4.0, 10.0])
    total_s = cluster.seconds(slow, counts, counts).total_s
    assert total_s == pytest.approx(max(seconds, 10.5))


def test_more_samples_for_one_rank_take_longer_by_its_own_speed() -> None:
    cluster = job_of(ranks=4).cluster
    counts = np.array([1.0, 5, 5, 5])
    seconds = cluster.seconds(cluster.condition([SlowDevice(device=0, factor=2)]), counts, np.full(4, 5.0))
    assert seconds.ranks_s == pytest.approx([2 * (0.5 + 0.9), 5.0, 5.0, 5.0])


@pytest.mark.parametrize(
    ("layout", "together"),
    [
        (Layout(dp_shard=8, ep=4), 4),
        (Layout(dp_shard=8, tp=2, ep=4), 2),
        (Layout(dp_shard=8, cp=2, ep=4), 2),
        (Layout(dp_shard=8, ep=2, etp=2), 4),
        (Layout(dp_shard=8, cp=2, tp=2, ep=4), 1),
        (Layout(dp_shard=8, cp=2, tp=2, ep=2), 1),
        (Layout(dp_shard=8), 1),
    ],
    ids=str,
)
def test_experts_are_spread_over_the_ranks_of_cp_and_tp_before_other_data_parallel_ones(
    layout: Layout, together: int
) -> None:
    """ep x etp ranks exchange tokens; those of cp and tp work on the same samples already."""
    cluster = Cluster(parts_of(), layout, 1, layout.world_size, 1)
    slow = cluster.condition([SlowDevice(device=5 * layout.cp * layout.tp, factor=2)])
    passes_s = cluster.seconds(slow, *np.full((2, 8), 4.0)).passes_s[0]
    first = 5 // together * together
    assert passes_s.tolist() == [8.0 if first <= rank < first + together else 4.0 for rank in range(8)]


def test_experts_of_one_stage_do_not_hold_up_those_of_another() -> None:
    cluster = Cluster(parts_of(pp=2), Layout(dp_shard=4, ep=2, pp=2), 1, 8, 1)
    passes_s = cluster.seconds(cluster.condition([SlowDevice(device=5, factor=2)]), *np.full((2, 4), 4.0)).passes_s
    assert passes_s.tolist() == [[4.0] * 4, [8.0, 8.0, 4.0, 4.0]]


def test_narrow_links_hold_up_the_sends_of_their_nodes_pipelines_alone() -> None:
    """Sends cost 0.1 s per micro-batch and 0.2 s per sample; device 0 of two 8-GPU nodes is in data-parallel ranks 0 to
    3 of stage 0, and node 1 has their second stages."""
    parts = parts_of(pp=2, sends=Speed(0.1, 0.2), bubble=0.0, gradients_once_s=0.0, rest_s=0.0)
    cluster = Cluster(parts, Layout(dp_shard=8, pp=2), 2, 8, 1)
    division = np.full((2, 8), 4.0)
    usual = cluster.seconds(cluster.condition([]), *division).ranks_s
    assert usual == pytest.approx([4.0 + 4 * 0.3] * 8)
    narrow = cluster.seconds(cluster.condition([NarrowLink(node=0, factor=3)]), *division).ranks_s
    assert narrow == pytest.approx([4.0 + 3 * 4 * 0.3] * 8)
    inside = cluster.seconds(cluster.condition([NarrowLink(node=0, tier="scaleup", factor=3)]), *division).ranks_s
    assert inside == pytest.approx(usual)


def test_one_pipeline_of_several_waits_for_its_own_narrow_link() -> None:
    parts = parts_of(pp=2, sends=Speed(0.0, 0.5), gradients_tier="scaleup", bubble=0.0)
    cluster = Cluster(parts, Layout(dp_replicate=2, dp_shard=2, pp=2), 2, 4, 2)
    links = [NarrowLink(node=1, factor=3), NarrowLink(node=1, factor=2)]
    condition = cluster.condition(links)
    assert condition.sends.tolist() == [1, 1, 6, 6], "what is narrow twice is narrower yet"
    assert condition.network.tolist() == [[1, 1, 6, 6]] * 2
    assert condition.gradients == 1.0
    assert cluster.condition([NarrowLink(factor=2)]).sends.tolist() == [2, 2, 2, 2], "every node"
    assert cluster.condition([NarrowLink(tier="scaleup", factor=5), *links]).gradients == 5


def test_gradients_that_each_micro_batch_exchanges_count_with_the_most_of_any_rank() -> None:
    parts = parts_of(gradients_each_s=0.3, gradients_once_s=0.2, rest_s=0.05)
    cluster = Cluster(parts, Layout(dp_shard=2), 1, 2, 1)
    seconds = cluster.seconds(cluster.condition([]), np.array([4.0, 2.0]), np.array([4.0, 2.0]))
    assert seconds.exchanged_s == pytest.approx(4 * 0.3 + 0.2)
    assert seconds.total_s == pytest.approx(4.0 + 4 * 0.3 + 0.2 + 0.05)
    slowed = cluster.seconds(cluster.condition([NarrowLink(factor=2)]), np.array([4.0, 2.0]), np.array([4.0, 2.0]))
    assert slowed.exchanged_s == pytest.approx(2 * (4 * 0.3 + 0.2))


def test_a_pipeline_fills_and_drains_with_the_other_stages_passes() -> None:
    """Stages of 1, 2 and 4 s per micro-batch: the slowest works throughout, and waits half of the others' time once."""
    stages = tuple(StageTime(Speed(seconds, 0.0), NONE, NONE, 0.0) for seconds in (1.0, 2.0, 4.0))
    parts = parts_of(pp=3, stages=stages, bubble=0.5, sends=NONE)
    cluster = Cluster(parts, Layout(pp=3), 1, 3, 1)
    seconds = cluster.seconds(cluster.condition([]), np.array([5.0]), np.array([5.0]))
    assert seconds.passes_s[:, 0].tolist() == [5.0, 10.0, 20.0]
    assert seconds.ranks_s.tolist() == [20.0 + 0.5 * (1.0 + 2.0)]


def test_lines_are_the_times_of_none_and_of_a_usual_number_of_samples() -> None:
    """0.1 s per micro-batch and 0.9 s per sample, twice that on the slow rank; hidden by launches, no slope."""
    cluster = job_of(ranks=2).cluster
    empty_s, each_s = cluster.lines(cluster.condition([SlowDevice(device=1, factor=2)]), 3, 10.0)
    assert empty_s == pytest.approx([0.3, 0.6])
    assert each_s == pytest.approx([0.9, 1.8])
    launched = job_of(ranks=2, parts=parts_of(launch_s=100.0)).cluster
    empty_s, each_s = launched.lines(launched.condition([]), 3, 10.0)
    assert empty_s == pytest.approx([300.0, 300.0]) and each_s.tolist() == [1e-12, 1e-12]
