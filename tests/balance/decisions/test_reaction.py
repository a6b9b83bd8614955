"""How soon samples are divided otherwise after a rank has become slow, whatever the scheduler was doing just then.

Ranks of a second and a half a step, whose steps differ by 5%, of which one in a hundred takes three times as long, and
each twenty-fifth a third longer, beside a checkpoint that is written. Speeds are exchanged a step late, as in a run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import pairwise

import pytest
from lab.drawing import slow_after

from trainspec_cli.balance.batch.division import Division
from trainspec_cli.balance.decisions.shares import ChangeCost, ShareScheduler
from trainspec_cli.balance.decisions.speeds import SETTLING_S, SKIPPED_STEPS, SpeedTracker

RANKS, SAMPLES, SAMPLE_S = 4, 64, 0.1
EVEN = SAMPLES // RANKS
REACTION_STEPS = 5
Pace = Callable[[int, int], float]
"""(rank, step) -> how many times as long it takes; steps count from 1."""


def shares_of_steps(pace: Pace, steps: int, seed: int) -> list[tuple[int, ...]]:
    """Return the samples of each rank in each step."""
    draw, scheduler = random.Random(seed), ShareScheduler(Division((1.0,) * RANKS, EVEN), SAMPLES, 0.1)
    trackers = [SpeedTracker(0.1, SETTLING_S) for _ in range(RANKS)]
    costs = [ChangeCost() for _ in range(RANKS)]
    sizes: list[tuple[int, ...]] = [()] * RANKS
    made: list[tuple[int, ...]] = []
    for step in range(1, steps + 1):
        reported = [tracker.estimate for tracker in trackers]
        change_s = max(cost.seconds for cost in costs)
        own = [scheduler.division.of_rank(rank, 0, SAMPLES) for rank in range(RANKS)]
        made.append(tuple(one.samples for one in own))
        times_s = []
        for rank in range(RANKS):
            seconds = own[rank].samples * SAMPLE_S * pace(rank, step) * draw.lognormvariate(0, 0.05)
            seconds *= (3.0 if draw.random() < 0.01 else 1.0) * (1.3 if step % 25 == 0 else 1.0)
            if own[rank].sizes != sizes[rank]:
                seconds += 2.0 if step == 1 else 0.3 * SAMPLE_S * own[rank].samples  # compiles, allocates
            sizes[rank] = own[rank].sizes
            times_s.append(seconds)
        for rank, seconds in enumerate(times_s):
            trackers[rank].note(own[rank].samples, len(own[rank].sizes), seconds, max(times_s) - seconds)
            costs[rank].note(own[rank].samples, len(own[rank].sizes), seconds)
        scheduler.note_step(SAMPLES, reported, 0.0, change_s=change_s)
    return made


def reaction(made: list[tuple[int, ...]], rank: int, since: int) -> float:
    """Return how many steps from `since` on were made before the rank had a sixth less than then."""
    before = made[since - 1][rank]
    return next((late for late, counts in enumerate(made[since - 1 :]) if counts[rank] < before * 5 / 6), math.inf)


@pytest.mark.parametrize("first", slow_after(12, [*range(1, 13), 20, 37, 60]))
@pytest.mark.parametrize("factor", [1.6, 2.0, 5.0, 14.0])
def test_a_slow_rank_has_less_within_five_steps_whenever_that_begins(factor: float, first: int) -> None:
    """While its speed is being learnt, too."""
    late = [
        reaction(
            shares_of_steps(lambda rank, step: factor if rank == 2 and step >= first else 1.0, first + 12, seed),
            2,
            first,
        )
        for seed in range(6)
    ]
    assert max(late) <= REACTION_STEPS


def test_another_rank_that_becomes_slow_after_a_directive_has_less_within_five_steps() -> None:
    """Right after it, too, where all learn how long steps of other sizes take."""
    late = []
    for seed in range(60):
        since = 24 + seed % 12

        def pace(rank: int, step: int, since: int = since) -> float:
            return 3.0 if rank == 2 and step >= 20 else 2.0 if rank == 0 and step >= since else 1.0

        late.append(reaction(shares_of_steps(pace, since + 12, seed), 0, since))
    assert sorted(late)[-2] <= REACTION_STEPS < math.inf > late[-1]


def test_a_rank_that_was_slow_for_a_while_gets_its_samples_back_and_keeps_them() -> None:
    """A change, and one back; now and then a correction of the first."""
    changes = []
    for seed in range(60):
        until = 24 + seed % 12
        made = shares_of_steps(lambda rank, step: 2.0 if rank == 2 and 20 <= step < until else 1.0, 90, seed)  # noqa: B023
        assert max(made[-1]) - min(made[-1]) <= 2
        changes.append(sum(one != other for one, other in pairwise(made)))
    assert sum(changes) <= 2.2 * len(changes) and max(changes) <= 4


@pytest.mark.slow
def test_ten_thousand_healthy_steps_change_no_shares() -> None:
    for seed in range(10):
        assert set(shares_of_steps(lambda rank, step: 1.0, 1000, 1000 + seed)) == {(EVEN,) * RANKS}


def test_two_disturbed_steps_of_a_start_are_no_slow_rank() -> None:
    """Three steps are looked at: all of them must be slow."""
    tracker = SpeedTracker(0.1)
    for seconds in (9.0, 3.0, 3.0, 1.0):
        tracker.note(1, 1, seconds)
    assert tracker.speed is None and tracker.estimate is not None
    assert tracker.estimate.per_sample_s == 1.0 and not tracker.estimate.is_settled


def test_steps_before_and_after_a_steep_change_are_not_learnt_from_together() -> None:
    """Eight more steps give the speed, where 50 were needed to believe in the median of both."""
    tracker = SpeedTracker(0.1)
    for seconds in (1.0,) * (SKIPPED_STEPS + 5) + (8.0,) * 8:
        tracker.note(1, 1, seconds)
    assert tracker.speed is not None and tracker.speed.per_sample_s == 8.0 and tracker.speed.is_settled
