"""The best that could be made of a disturbed cluster, by hand and against every division of small ones."""

from itertools import product

import numpy as np
import pytest
from scheduler.jobs import job_of

from trainspec_cli.scheduler.disturbance import Event, SlowDevice
from trainspec_cli.scheduler.ideal import Ideal, best_step
from trainspec_cli.scheduler.job import DisturbedJob


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
