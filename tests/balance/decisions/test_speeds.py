"""A rank's speed as its own steps show it: what is a change, and what is noise."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainspec_cli.balance.decisions.speeds import (
    CONFIRMING_STEPS,
    EARLY_NOISE,
    FIRST_STEPS,
    REFINING_STEPS,
    REMEMBERED_STEPS,
    SKIPPED_STEPS,
    Speed,
    SpeedTracker,
    StepShape,
    through,
)

LEARNING = SKIPPED_STEPS + FIRST_STEPS


def tracker(sample_s: float = 0.5, change: float = 0.1) -> SpeedTracker:
    """One that has learnt a rank's time for a sample, in steps of 8."""
    found = SpeedTracker(change)
    for _ in range(LEARNING):
        found.note(8, 1, 8 * sample_s)
    assert found.speed == Speed(0.0, sample_s)
    return found


def test_a_speed_is_the_median_of_the_first_steps_that_count() -> None:
    found = SpeedTracker(0.1)
    for seconds in (90.0, 50.0, 8.0, 8.0, 7.9, 8.1, 7.8, 8.0, 8.2):  # the first two compile
        found.note(8, 2, seconds)
        assert found.speed is None
    found.note(8, 2, 30.0)
    assert found.speed == Speed(0.0, 1.0)


def test_a_rank_whose_first_steps_differ_widely_is_measured_for_longer() -> None:
    found, seen = SpeedTracker(0.1), 0
    draw = random.Random(0)
    while found.speed is None:
        found.note(8, 1, 8 * draw.lognormvariate(0, 0.3))
        seen += 1
    assert 3 * LEARNING < seen <= SKIPPED_STEPS + REMEMBERED_STEPS
    assert found.speed.per_sample_s == pytest.approx(1.0, rel=0.2)


def test_a_noise_of_a_tenth_takes_some_steps_more() -> None:
    found, seen = SpeedTracker(0.1), 0
    draw = random.Random(0)
    while found.speed is None:
        found.note(8, 1, 8 * draw.lognormvariate(0, 0.1))
        seen += 1
    assert LEARNING < seen < REMEMBERED_STEPS - LEARNING


def test_a_noise_that_was_there_from_the_start_is_no_change() -> None:
    found = SpeedTracker(0.1)
    for step in range(REMEMBERED_STEPS):
        found.note(8, 1, 8 * (0.92, 1.0, 1.08)[step % 3])
        if found.speed:
            break
    known = found.speed
    for pace in (1.3, 1.3, 1.3, 1.3):
        found.note(8, 1, 8 * pace)
    assert known is not None
    assert found.speed == known


def test_shares_that_change_while_a_speed_is_learnt_begin_it_anew() -> None:
    found = SpeedTracker(0.1)
    for _ in range(LEARNING - 1):
        found.note(8, 1, 80.0)
    for _ in range(LEARNING - 1):
        found.note(4, 1, 4.0)
        assert found.speed is None
    found.note(4, 1, 4.0)
    assert found.speed == Speed(0.0, 1.0)


def test_a_rank_without_samples_shows_no_speed() -> None:
    found = SpeedTracker(0.1)
    for _ in range(2 * LEARNING):
        found.note(0, 1, 0.001)
        found.note(0, 1, 0.0)
    assert found.speed is None


def test_three_steps_in_a_row_confirm_a_change() -> None:
    found = tracker()
    for seconds in (7.0, 9.0):
        found.note(8, 1, seconds)
        assert found.speed == Speed(0.0, 0.5)
    found.note(8, 1, 8.0)
    assert found.speed == Speed(0.0, 1.0)


@pytest.mark.parametrize(("pace", "confirmed"), [(1.09, False), (1.12, True), (0.91, False), (0.88, True)])
def test_a_change_of_a_tenth_is_confirmed(pace: float, confirmed: bool) -> None:
    found = tracker()
    for _ in range(CONFIRMING_STEPS):
        found.note(8, 1, 4.0 * pace)
    assert (found.speed != Speed(0.0, 0.5)) == confirmed


@pytest.mark.parametrize(
    ("usual_s", "paces", "confirmed"),
    [
        (16.0, (2.0, 2.0), True),  # 64 s, twice as slow
        (16.0, (0.4, 0.4), False),  # 12.8 s
        (40.0, (0.4, 0.4), True),
        (7.0, (2.0, 2.0), False),  # 28 s are too few
        (60.0, (1.21, 1.21), True),  # twice what could be noise
        (60.0, (1.19, 1.3), False),
        (60.0, (1 / 1.21, 1 / 1.21), True),
        (60.0, (0.88, 0.6), False),
        (900.0, (2.0,), False),  # a single step says nothing, however long
        (60.0, (2.0, 0.4), False),
        (60.0, (2.0, 1.0, 2.0), False),
    ],
)
def test_two_long_steps_confirm_a_plain_change(usual_s: float, paces: tuple[float, ...], confirmed: bool) -> None:
    found = tracker(usual_s / 8)
    for pace in paces:
        found.note(8, 1, usual_s * pace)
    assert (found.speed != Speed(0.0, usual_s / 8)) == confirmed


def test_noise_makes_a_change_less_plain() -> None:
    draw = random.Random(3)
    for noise, confirmed in ((0.01, True), (0.1, False)):
        found = SpeedTracker(0.1)
        for _ in range(REMEMBERED_STEPS):
            found.note(8, 1, 80 * draw.gauss(1, noise))
        known = found.speed
        for _ in range(2):
            found.note(8, 1, 80 * 1.5)
        assert (found.speed != known) == confirmed


@pytest.mark.parametrize(
    "paces",
    [
        (2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0),  # never three in a row
        (2.0, 2.0, 0.4, 2.0, 2.0, 0.4, 2.0, 2.0),  # not on the same side
        (10.0, 1.0, 0.1, 1.0, 10.0),
    ],
)
def test_single_steps_are_no_change(paces: tuple[float, ...]) -> None:
    found = tracker()
    for pace in paces:
        found.note(8, 1, 4.0 * pace)
        assert found.speed == Speed(0.0, 0.5)


def test_what_changes_together_with_the_shares_is_not_a_change_of_speed() -> None:
    """Departures from before the change of shares do not count, and the first steps after it are passed over."""
    found = tracker()
    found.note(8, 1, 8.0)
    found.note(8, 1, 8.0)
    for _ in range(SKIPPED_STEPS):
        found.note(9, 1, 40.0)
    found.note(9, 1, 9.0)
    found.note(9, 1, 9.0)
    assert found.speed == Speed(0.0, 0.5)
    found.note(9, 1, 9.0)
    assert found.speed == Speed(0.0, 1.0)


def test_micro_batches_as_large_as_before_need_no_warming_up() -> None:
    """33 of one sample instead of 32: what departed before the change counts, and the first step after it."""
    found = SpeedTracker(0.1)
    for _ in range(LEARNING):
        found.note(32, 32, 32.0)
    found.note(32, 32, 64.0)
    found.note(33, 33, 66.0)
    assert found.speed == Speed(0.0, 2.0)


def test_a_shape_that_tells_something_new_is_learnt_in_a_few_steps_where_the_noise_is_known() -> None:
    """True: 2 s per micro-batch and 0.5 s per sample."""
    found = SpeedTracker(0.1)
    for _ in range(LEARNING):
        found.note(8, 2, 8.0)
    for _ in range(SKIPPED_STEPS + CONFIRMING_STEPS - 1):
        found.note(4, 2, 6.0)
        assert found.speed == Speed(0.0, 1.0)
    found.note(4, 2, 6.0)
    assert found.speed == Speed(2.0, 0.5)


def test_a_noisy_rank_learns_another_shape_in_more_steps() -> None:
    draw, needed = random.Random(0), []
    for noise in (0.01, 0.1):
        found = SpeedTracker(0.1)
        for _ in range(REMEMBERED_STEPS):
            found.note(8, 1, 8 * draw.gauss(1, noise))
        known, steps = found.speed, 0
        while found.speed == known:
            found.note(4, 1, 6 * draw.gauss(1, noise))
            steps += 1
        needed.append(steps - SKIPPED_STEPS)
    assert needed[0] == CONFIRMING_STEPS and 9 <= needed[1] <= 25


def test_a_speed_is_known_the_better_the_more_steps_it_was_learnt_from() -> None:
    """Paces of 0.98 and 1.02 have a median absolute deviation of 0.02."""
    found, noise = SpeedTracker(0.1), 1.25 * 4 * 1.4826 * 0.02
    for step in range(LEARNING):
        found.note(8, 1, 80 * (0.98, 1.02)[step % 2])
    assert found.speed is not None and found.speed.noise == pytest.approx(noise / math.sqrt(FIRST_STEPS))
    for _ in range(2):
        found.note(8, 1, 160.0)
    assert found.speed.per_sample_s == 20.0 and found.speed.noise == pytest.approx(noise / math.sqrt(2))
    for step in range(REFINING_STEPS):
        found.note(8, 1, 160 * (0.98, 1.02)[step % 2])
    assert found.speed.noise == pytest.approx(noise / math.sqrt(REFINING_STEPS), rel=0.1)


@pytest.mark.parametrize("change", [0.1, 1.0])
def test_a_rank_whose_steps_always_differ_widely_has_a_settled_speed_in_the_end(change: float) -> None:
    """Short steps of a busy machine, before and after a change: no number of them brings the noise below EARLY_NOISE,
    and decisions on nodes and layouts need the settled speeds of all ranks."""
    draw, found = random.Random(0), SpeedTracker(change)
    for seconds in (0.01, 8.0):
        for _ in range(2 * REMEMBERED_STEPS):
            found.note(1, 1, seconds * draw.lognormvariate(0, 0.8))
        assert found.estimate is not None and found.estimate.is_settled
        assert found.estimate.per_sample_s == pytest.approx(seconds, rel=0.7)
        assert found.estimate.noise > EARLY_NOISE


def test_a_change_within_a_ranks_own_noise_is_seen_in_many_steps_together() -> None:
    """15% beside a noise of 6%: three steps would need to be beyond 24%."""
    draw, found = random.Random(1), SpeedTracker(0.1)
    for _ in range(100):
        found.note(8, 1, 8 * draw.gauss(1, 0.06))
    known = found.speed
    assert known is not None
    for _ in range(2 * REMEMBERED_STEPS):
        found.note(8, 1, 8 * draw.gauss(1.15, 0.06))
    assert found.speed is not None
    assert found.speed.per_sample_s / known.per_sample_s == pytest.approx(1.15, rel=0.05)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), noise=st.floats(0, 0.04))
def test_a_thousand_noisy_healthy_steps_show_no_change(seed: int, noise: float) -> None:
    draw, found = random.Random(seed), SpeedTracker(0.1)
    speeds = set()
    for _ in range(1000):
        found.note(8, 1, 8 * draw.lognormvariate(0, noise))
        speeds.add(found.speed)
    assert len(speeds - {None}) == 1


@pytest.mark.parametrize("shapes", [((8, 2), (4, 2)), ((8, 1), (8, 2)), ((8, 2), (9, 3))])
def test_two_shapes_tell_what_is_fixed_from_what_grows_with_the_samples(shapes: tuple[tuple[int, int], ...]) -> None:
    """True: 2 s per micro-batch and 0.5 s per sample."""
    found = SpeedTracker(0.1)
    for samples, micro_batches in shapes:
        for _ in range(LEARNING):
            found.note(samples, micro_batches, micro_batches * 2.0 + samples * 0.5)
    assert found.speed is not None
    assert (found.speed.fixed_s, found.speed.per_sample_s) == pytest.approx((2.0, 0.5))


def test_shapes_that_hardly_differ_do_not_tell() -> None:
    found = tracker()
    for _ in range(3 * LEARNING):
        found.note(9, 1, 4.6)
    assert found.speed == Speed(0.0, 0.5)


@pytest.mark.parametrize(
    ("now", "measured_s", "found"),
    [
        (StepShape(4, 1), 6.0, Speed(4.0, 0.5)),  # 8 samples took 8 s: half of that is fixed
        (StepShape(8, 2), 10.0, Speed(2.0, 0.75)),  # another micro-batch of the same samples costs what is fixed
        (StepShape(4, 1), 8.0 / 2, Speed(0.0, 1.0)),
        (StepShape(4, 1), 2.0, Speed(0.0, 0.5)),  # fewer samples cannot take less than their part: it is faster now
        (StepShape(4, 1), 9.0, Speed(0.0, 2.25)),  # nor more than all of them: it is slower now
        (StepShape(16, 2), 24.0, Speed(0.0, 1.5)),  # twice the same says nothing of the parts
    ],
)
def test_the_speed_through_two_measurements(now: StepShape, measured_s: float, found: Speed) -> None:
    assert through(StepShape(8, 1), Speed(0.0, 1.0), now, measured_s) == pytest.approx(found)


def test_the_time_of_samples_and_micro_batches() -> None:
    assert Speed(2.0, 0.5).time_s(6, 3) == 9.0
    assert Speed(2.0, 0.5).scaled(3) == Speed(6.0, 1.5)


def test_what_lasts_for_less_than_a_second_is_no_change() -> None:
    """Steps of 10 ms: a neighbour that takes the processor for half a second shows in fifty of them."""
    tracker = SpeedTracker(0.1, settling_s=1.0)
    for _ in range(99):
        tracker.note(1, 1, 0.01)
    assert tracker.speed is None
    for _ in range(20):
        tracker.note(1, 1, 0.01)
    known = tracker.speed
    assert known is not None
    for _ in range(25):
        tracker.note(1, 1, 0.02)
    tracker.note(1, 1, 0.01)
    assert tracker.speed == known
    for _ in range(60):
        tracker.note(1, 1, 0.02)
    assert tracker.speed is not None and tracker.speed.per_sample_s == pytest.approx(0.02)


@pytest.mark.parametrize(("waited_s", "is_known"), [(0.0, False), (0.1, False), (8.0, True)])
def test_a_rank_that_waits_for_a_slow_one_is_known_by_the_time_that_goes_by(waited_s: float, *, is_known: bool) -> None:
    """Of steps of 8 s it computes 10 ms: a hundred steps until it has computed for a second would take a quarter of an
    hour, and as long would a slow rank go unnoticed."""
    tracker = SpeedTracker(0.1, settling_s=1.0)
    for _ in range(8 + SKIPPED_STEPS):
        tracker.note(1, 1, 0.01, waited_s)
    assert (tracker.speed is not None) == is_known
    if tracker.speed is not None:
        assert tracker.speed.per_sample_s == pytest.approx(0.01)
        for _ in range(3):
            tracker.note(1, 1, 0.03, waited_s)
        assert tracker.speed.per_sample_s == pytest.approx(0.03)
