"""Which fragment goes when."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.policy.sites.schedule import SiteSchedule, fragment_of


@st.composite
def schedules(draw: st.DrawFn) -> SiteSchedule:
    fragments, between = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    return SiteSchedule(draw(st.integers(1, 200)), fragments * between, fragments, draw(st.integers(0, between)))


@given(schedules())
def test_every_step_lies_in_one_window(schedule: SiteSchedule) -> None:
    steps = [step for number in range(schedule.last_round + 1) for step in schedule.window(number)]
    assert steps == list(range(schedule.total_steps))


@given(schedules())
def test_one_exchange_is_on_its_way_at_a_time(schedule: SiteSchedule) -> None:
    exchanges = [schedule.exchange(number) for number in range(1, schedule.last_round + 1)]
    for earlier, later in pairwise(exchanges):
        assert earlier.sent_at <= earlier.applied_at <= later.sent_at
    assert exchanges[-1].sent_at == exchanges[-1].applied_at == schedule.total_steps
    assert exchanges[-1].fragments == tuple(range(schedule.fragments))


@given(schedules())
def test_exchanges_are_found_by_their_step(schedule: SiteSchedule) -> None:
    found = [exchange for step in range(schedule.total_steps + 1) if (exchange := schedule.sent_at(step))]
    assert [exchange.round for exchange in found] == list(range(1, schedule.last_round + 1))


@given(schedules(), st.data())
def test_a_checkpoint_has_applied_the_rounds_before_its_step(schedule: SiteSchedule, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, schedule.total_steps))
    applied = [n for n in range(schedule.last_round + 1) if schedule.applied_at(n) < step]
    assert schedule.newest_applied(step) == max(applied, default=0)


def test_each_fragment_is_exchanged_every_interval() -> None:
    schedule = SiteSchedule(total_steps=100, interval_steps=30, fragments=3, delay_steps=4)
    sent = {step: each.fragments for step in range(100) if (each := schedule.sent_at(step))}
    assert sent == {10: (0,), 20: (1,), 30: (2,), 40: (0,), 50: (1,), 60: (2,), 70: (0,), 80: (1,), 90: (2,)}
    assert schedule.exchange(1).applied_at == 14


def test_fragments_are_strided() -> None:
    assert [fragment_of(layer, 3) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert fragment_of(None, 3, is_input=True) == 0
    assert fragment_of(None, 3) == 2
