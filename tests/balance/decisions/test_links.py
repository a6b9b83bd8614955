"""Links learnt from synthetic samples: what is found, how soon, and what is not taken for a change."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from trainspec_cli.balance.decisions.links import (
    COST_SHARE,
    FIRST_SAMPLES,
    LEAST_INTERVAL_STEPS,
    AxisLinks,
    LinkChange,
    LinkTracker,
    SampleTimes,
    Transfer,
    sampling_interval,
    transfer_of,
)

BYTES, RATE, CHANGE = 4e6, 2e9, 0.1
RANKS = (4, 5, 6, 7)


def sample(rate: float = RATE, waits_s: Iterable[float] = (0.003, 0.002, 0.0, 0.001), noise: float = 1.0):
    return [Transfer(BYTES, BYTES / rate * noise, waited_s) for waited_s in waits_s]


def healthy(steps: int, deviation: float, seed: int = 3) -> list[list[Transfer]]:
    drawn = random.Random(seed)
    return [sample(noise=max(0.2, drawn.gauss(1, deviation))) for _ in range(steps)]


def note(tracker: LinkTracker, samples: Iterable[list[Transfer]], first: int = 0) -> list[LinkChange]:
    changes = (tracker.note(step, one) for step, one in enumerate(samples, first))
    return [change for change in changes if change is not None]


def test_a_link_shows_its_speed_and_noise_and_who_comes_last() -> None:
    tracker = LinkTracker(RANKS, CHANGE)
    assert tracker.speed is None
    assert not note(tracker, healthy(50, 0.05))
    speed = tracker.speed
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(RATE, rel=0.03)
    assert speed.noise == pytest.approx(0.05, rel=0.4)
    assert (speed.ranks, speed.last_rank, speed.sent_bytes, speed.samples) == (RANKS, 6, BYTES, 50)
    assert speed.waited_s == 0.003


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_link_at_half_or_twice_its_speed_is_found_in_three_samples(factor: float) -> None:
    tracker = LinkTracker(RANKS, CHANGE)
    note(tracker, healthy(30, 0.03))
    found = [tracker.note(step, sample(RATE * factor)) for step in (300, 310, 320)]
    assert found[:2] == [None, None]
    change = found[2]
    assert change is not None
    assert change.since_step == 300
    assert change.before_bytes_per_s == pytest.approx(RATE, rel=0.03)
    assert change.now_bytes_per_s == pytest.approx(RATE * factor)
    speed = tracker.speed
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(RATE * factor), "what was measured before is forgotten"
    assert not note(tracker, [sample(RATE * factor)] * 30), "it is told once"


@pytest.mark.parametrize("deviation", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_healthy_samples_raise_no_alarm(deviation: float, seed: int) -> None:
    assert not note(LinkTracker(RANKS, CHANGE), healthy(1000, deviation, seed))


def test_samples_now_and_then_that_the_machine_has_held_up_raise_none() -> None:
    drawn = random.Random(5)
    held_up = [sample(noise=drawn.gauss(1, 0.05) * (6 if drawn.random() < 0.04 else 1)) for _ in range(1000)]
    assert not note(LinkTracker(RANKS, CHANGE), held_up)


def test_a_change_of_less_than_a_tenth_is_none() -> None:
    tracker = LinkTracker(RANKS, CHANGE)
    note(tracker, healthy(30, 0.01))
    assert not note(tracker, [sample(RATE * 0.94)] * 200)


def test_waiting_is_not_taken_for_a_slow_link() -> None:
    """One rank comes late, by a thousand times what the transfer takes; the link is as it was."""
    tracker = LinkTracker(RANKS, CHANGE)
    note(tracker, healthy(60, 0.02))
    assert not note(tracker, [sample(waits_s=(2.0, 2.0, 2.0, 0.0))] * 100)
    speed = tracker.speed
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(RATE, rel=0.01)
    assert (speed.waited_s, speed.last_rank) == (2.0, 7)


def test_one_rank_that_ends_late_makes_the_exchange_late() -> None:
    """The slow sender itself is done at once: gloo has handed its data to the kernel."""
    tracker = LinkTracker((0, 1), CHANGE)
    tracker.note(1, [Transfer(BYTES, 1e-5), Transfer(BYTES, 0.01)])
    speed = tracker.speed
    assert speed is not None
    assert speed.bytes_per_s == pytest.approx(BYTES / 0.01)


def test_exchanges_of_another_size_are_learnt_anew_instead_of_called_slow() -> None:
    tracker = LinkTracker((0, 1), CHANGE)
    note(tracker, [[Transfer(BYTES, BYTES / RATE)] * 2] * 30)
    small = [Transfer(BYTES / 100, BYTES / 100 / (RATE / 10))] * 2
    assert not note(tracker, [small] * 30)
    speed = tracker.speed
    assert speed is not None
    assert (speed.sent_bytes, speed.samples) == (BYTES / 100, 30)
    assert note(tracker, [[Transfer(BYTES / 100, BYTES / 100 / (RATE / 20))] * 2] * 3), "and compared from then on"


def test_a_rank_without_exchanges_says_nothing() -> None:
    tracker = LinkTracker((0, 1), CHANGE)
    assert tracker.note(1, [Transfer(), Transfer()]) is None
    assert tracker.speed is None


def test_an_axis_names_the_link_that_changed_most_and_its_slowest() -> None:
    axis = AxisLinks("tp", [(0, 1), (2, 3), (4, 5)], CHANGE)
    assert axis.slowest is None
    rates = [RATE, RATE, RATE]
    for step in range(20):
        assert axis.note(step, [sample(rate, (0.0, 0.0)) for rate in rates]) is None
    rates = [RATE, RATE / 3, RATE / 2]
    changes = [axis.note(step, [sample(rate, (0.0, 0.0)) for rate in rates]) for step in range(20, 23)]
    change = changes[-1]
    assert change is not None
    assert (change.ranks, change.links, change.since_step) == ((2, 3), 2, 20)
    assert change.factor == pytest.approx(3)
    slowest = axis.slowest
    assert slowest is not None
    assert slowest.ranks == (2, 3)
    assert len(axis) == 3


def test_a_transfer_is_the_median_pace_of_the_large_exchanges() -> None:
    exchanges = [(8e6, 0.004, 0.1), (5e6, 0.0025, 0.3), (8e6, 0.4, 0.2), (1e3, 0.1, 0.2)]
    assert transfer_of(exchanges) == Transfer(8e6, pytest.approx(0.004), pytest.approx(0.2))
    assert transfer_of([]) == transfer_of([(0.0, 0.1, 0.1)]) == Transfer()


def test_samples_are_as_far_apart_as_their_cost_asks() -> None:
    assert sampling_interval([], 1.0) == sampling_interval([0.5], 0.0) == LEAST_INTERVAL_STEPS
    assert sampling_interval([1e-4], 1.0) == LEAST_INTERVAL_STEPS
    interval = sampling_interval([0.004, 0.003, 9.0], 0.04)
    assert 0.004 / (interval * 0.04) <= COST_SHARE < 0.004 / ((interval - 1) * 0.04)


def test_samples_follow_soon_while_links_are_undecided_and_no_more_than_are_spared() -> None:
    times = SampleTimes(CHANGE)
    soon = [times.steps_to_next(10, 1, is_undecided=True) for _ in range(FIRST_SAMPLES + 3)]
    assert soon == [1] * FIRST_SAMPLES + [10, 1, 10], "each of the others spares one"
    assert SampleTimes(CHANGE).steps_to_next(10, 4, is_undecided=True) == 4
    assert SampleTimes(CHANGE).steps_to_next(10, 12, is_undecided=False) == 12


def test_two_steps_of_another_time_ask_for_a_sample_once() -> None:
    times = SampleTimes(CHANGE)
    steps_s = [1.0, 1.02] * FIRST_SAMPLES
    assert not any(times.note_step(step_s) for step_s in [*steps_s, 1.5, 1.0, 1.5])
    assert times.note_step(1.5)
    assert not any(times.note_step(1.5) for _ in range(FIRST_SAMPLES)), "that is usual now"
    assert [times.note_step(1.0), times.note_step(1.0)] == [False, True], "faster ones do as well"


def test_steps_that_change_all_the_time_ask_for_no_more_samples_than_are_spared() -> None:
    times = SampleTimes(CHANGE)
    asked = sum(times.note_step(1.5 if step // 15 % 2 else 1.0) for step in range(3000))
    assert asked == FIRST_SAMPLES
    times.steps_to_next(10, 1, is_undecided=False)
    assert sum(times.note_step(1.5 if step // 15 % 2 else 1.0) for step in range(3000)) == 1
