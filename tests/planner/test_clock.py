"""Simulated time."""

import math

from trainspec_cli.planner.clock import Clock


def test_actions_come_in_the_order_of_time_and_then_of_scheduling() -> None:
    clock, taken = Clock(), []
    for name, delay_s in (("late", 5.0), ("first", 1.0), ("second", 1.0)):
        clock.after(delay_s, lambda name=name: taken.append((name, clock.now_s)))
    while clock.peek_s() < math.inf:
        clock.step()
    assert taken == [("first", 1.0), ("second", 1.0), ("late", 5.0)]


def test_an_action_may_schedule_another() -> None:
    clock, taken = Clock(), []
    clock.after(2.0, lambda: clock.after(3.0, lambda: taken.append(clock.now_s)))
    clock.step()
    assert clock.peek_s() == 5.0
    clock.step()
    assert taken == [5.0]


def test_the_same_seed_gives_the_same_chance() -> None:
    assert Clock(3).random.random() == Clock(3).random.random() != Clock(4).random.random()
