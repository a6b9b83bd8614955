"""Where a step's time goes: parts, exchanges, and what of these nothing hides."""

from __future__ import annotations

import random

import pytest
import torch

from trainspec_cli.engine import digest as marks
from trainspec_cli.engine.observe.clock import Interval, StepClock, exchange_time
from trainspec_cli.run.folder.event_types.events import PARTS


class Time:
    """A clock that the test advances."""

    def __init__(self):
        self._now_s = 100.0

    def perf_counter(self):
        return self._now_s

    def sleep(self, seconds):
        self._now_s += seconds


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr(marks, "time", time)
    return time


def test_parts_sum_to_the_step_and_nested_time_is_counted_once(time):
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with clock.part("forward"):
        time.sleep(0.02)
        with clock.collective():
            time.sleep(0.04)
    with clock.part("optimizer"):
        time.sleep(0.01)
    time.sleep(0.005)
    parts = clock.cut().parts_s()
    spent = {"forward": 0.02, "exposed_comm": 0.04, "optimizer": 0.01, "other": 0.005}
    assert parts == pytest.approx(dict.fromkeys(PARTS, 0.0) | spent)


def test_a_cut_starts_the_next_step_at_once(time):
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    time.sleep(0.01)
    first = clock.cut().parts_s()
    second = clock.cut().parts_s()
    assert first["other"] == pytest.approx(0.01)
    assert sum(second.values()) == 0


def test_a_part_that_raises_gives_the_time_back_to_the_part_around_it(time):
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with pytest.raises(RuntimeError), clock.part("forward"):
        raise RuntimeError
    time.sleep(0.01)
    assert clock.cut().parts_s()["other"] == pytest.approx(0.01)


def test_a_restart_forgets_what_came_before(time):
    clock = StepClock(torch.device("cpu"))
    with clock.part("forward"):
        time.sleep(5.0)
    time.sleep(3.0)
    clock.restart()
    time.sleep(1.0)
    with clock.part("backward"):
        time.sleep(2.0)
    parts = clock.cut().parts_s()
    assert {name: seconds for name, seconds in parts.items() if seconds} == pytest.approx(
        {"other": 1.0, "backward": 2.0}
    )


def test_exchanges_beside_the_computation_are_exposed_where_nothing_is_computed(time):
    """Injected: 3 s of an exchange, 1.5 of them hidden by the backward; 0.5 s of a later one that the optimizer hides;
    and 0.25 s of waiting within the first."""
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    with clock.part("backward"):
        time.sleep(1.0)
        begin_s = time.perf_counter()
        time.sleep(1.5)
    time.sleep(1.25)
    with clock.collective():
        time.sleep(0.25)
        clock.note_beside(begin_s, time.perf_counter())
    with clock.part("optimizer"):
        clock.note_beside(time.perf_counter(), time.perf_counter() + 0.5)
        time.sleep(2.0)
    with clock.collective():
        time.sleep(0.125)
    assert clock.cut().exchange_time() == pytest.approx((3.625, 1.625))
    assert clock.cut().exchange_time() is None, "the next step has none"


def test_a_step_whose_exchanges_all_waited_has_no_figure(time):
    clock = StepClock(torch.device("cpu"))
    with clock.collective():
        time.sleep(1.0)
    assert clock.cut().exchange_time() is None
    clock.note_beside(1.0, 2.0)
    clock.restart()
    assert clock.cut().exchange_time() is None, "of what came before the step"


# Exposed exchange against truths that are put in


@pytest.mark.parametrize(
    ("exchanges", "computing", "seconds", "exposed_s"),
    [
        ([], [(0, 9)], 0, 0),
        ([(2, 5)], [], 3, 3),
        ([(2, 5)], [(2, 5)], 3, 0),
        ([(2, 5)], [(0, 2), (5, 7)], 3, 3),
        ([(2, 5), (4, 6), (8, 9)], [(0, 3), (5.5, 8.5)], 5, 3),
        ([(0, 10)], [(1, 2), (4, 6), (5, 7), (9, 12)], 10, 5),
        ([(0, 1), (0, 1), (0, 1)], [(0.25, 0.5), (0.25, 0.5)], 1, 0.75),
        ([(4, 6), (0, 2)], [(5, 9), (1, 2)], 4, 2),
    ],
)
def test_what_is_exposed_is_the_exchange_without_the_computation(
    exchanges: list[Interval], computing: list[Interval], seconds: float, exposed_s: float
) -> None:
    assert exchange_time(exchanges, computing) == (seconds, exposed_s)


def test_random_intervals_against_moments_that_are_counted() -> None:
    """Whole numbers as bounds: every moment between two of them is in an interval or in none."""
    generator = random.Random(0)

    def draw(most: int) -> list[Interval]:
        begins = [generator.randrange(60) for _ in range(generator.randrange(most))]
        return [(begin, begin + generator.randrange(8)) for begin in begins]

    moments = [place + 0.5 for place in range(70)]
    for _ in range(20):
        exchanges, computing = draw(12), draw(12)
        going_on, busy = ([any(b < at < e for b, e in given) for at in moments] for given in (exchanges, computing))
        exposed = sum(one and not other for one, other in zip(going_on, busy, strict=True))
        assert exchange_time(exchanges, computing) == (sum(going_on), exposed)
