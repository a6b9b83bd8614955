"""The best that could be made of a disturbed cluster, by hand and against every division of small ones."""

from itertools import product

import numpy as np
import pytest
from balance.jobs import NONE, job_of, parts_of

from trainspec_cli.balance.decisions.speeds import Speed
from trainspec_cli.balance.disturbance import Event, SlowDevice
from trainspec_cli.balance.ideal import Ideal, best_step
from trainspec_cli.balance.job import DisturbedJob
from trainspec_cli.planner.time.samples import StageTime


def ideal_of(job: DisturbedJob, *events: Event, keeps: bool = False) -> Ideal:
    return best_step(
        job.cluster,
        job.cluster.condition(events),
        job.groups,
        job.batching.global_batch_size,
        job.even,
        job.largest_micro_batch,
        keeps_micro_batches=keeps,
    )


@pytest.mark.parametrize(("ranks", "each", "largest", "factor"), [(3, 4, 1, 2.0), (3, 3, 2, 3.0), (4, 3, 2, 1.4)])
def test_no_division_into_whole_samples_is_faster(ranks: int, each: int, largest: int, factor: float) -> None:
    job = job_of(ranks=ranks, each=each, largest=largest)
    condition = job.cluster.condition([SlowDevice(device=0, factor=factor)])
    fastest_s = min(
        job.cluster.seconds(condition, np.array(counts, float), np.full(ranks, float(number))).total_s
        for number in range(1, 2 * each + 1)
        for counts in product(range(number * largest + 1), repeat=ranks)
        if sum(counts) == ranks * each
    )
    found = ideal_of(job, SlowDevice(device=0, factor=factor))
    assert found.whole_s == pytest.approx(fastest_s) and found.real_s <= found.whole_s


def test_in_real_numbers_all_ranks_end_at_once() -> None:
    """7 ranks at 1 and one at 1/2 make 256 samples in 256 / 7.5 s of samples, and 0.1 s of each of 18 micro-batches
    of up to two samples."""
    job = job_of(ranks=8, each=32, largest=2)
    real_s = ideal_of(job, SlowDevice(device=0, factor=2)).real_s
    number = 18
    level = (8 * 32 * 0.9 + 7 * 0.1 * number + 0.5 * 0.2 * number) / 7.5
    assert real_s == pytest.approx(level + 0.25, rel=1e-6)


def test_memory_bounds_what_a_fast_rank_takes_over() -> None:
    """Where the number of micro-batches must stay, and none may grow, nothing can be shifted."""
    job = job_of(ranks=8, each=32, largest=1)
    slow = SlowDevice(device=0, factor=2)
    assert ideal_of(job, slow, keeps=True).whole_s == pytest.approx(64 + 0.25)
    assert ideal_of(job, slow).whole_s < 40


PLAIN = parts_of(stages=(StageTime(Speed(0.0, 1.0), NONE, NONE, 0.0),))
"""A second a sample, whatever the micro-batch; exchanges and the rest take 0.25 s per step."""


def test_replica_groups_share_by_their_speeds() -> None:
    """Of 24 samples the group of two slow ranks takes 8 in 4 x 2 s, and the other 16 in 8 s."""
    job = job_of(ranks=4, each=6, replica_groups=2, largest=2, parts=PLAIN)
    found = ideal_of(job, SlowDevice(device=0, factor=2), SlowDevice(device=1, factor=2))
    assert (found.whole_s, found.real_s) == (pytest.approx(8.25), pytest.approx(8.25))


def test_ranks_inside_a_group_share_by_their_speeds_too() -> None:
    """Speeds 1/2, 1, 1 and 1: the first group takes 3 of 7 parts of 28 samples, in 8 s."""
    job = job_of(ranks=4, each=7, replica_groups=2, largest=4, parts=PLAIN)
    found = ideal_of(job, SlowDevice(device=0, factor=2))
    assert (found.whole_s, found.real_s) == (pytest.approx(8.25), pytest.approx(8.25))


def test_samples_that_can_be_cut_end_no_later_than_whole_ones() -> None:
    """Speeds 1/3 and 1: eight samples take 8 / (4 / 3) s cut, and whole what the best of nine divisions takes."""
    job = job_of(ranks=2, each=4, largest=8, parts=PLAIN)
    found = ideal_of(job, SlowDevice(device=0, factor=3))
    assert found.real_s == pytest.approx(8 * 3 / 4 + 0.25)
    assert found.whole_s == pytest.approx(min(max(3 * n, 8 - n) for n in range(9)) + 0.25)


def test_a_group_that_is_away_is_left_out() -> None:
    job = job_of(ranks=4, each=6, replica_groups=2, largest=12, parts=PLAIN)
    found = best_step(
        job.cluster, job.cluster.condition([]), job.groups[1:], 24, job.even, 12, keeps_micro_batches=False
    )
    assert (found.whole_s, found.real_s) == (pytest.approx(12.25), pytest.approx(12.25))
