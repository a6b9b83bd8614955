"""Which fragment goes when."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.decisions.schedule import (
    BEGINNING,
    SiteExchange,
    SiteSchedule,
    fragment_of,
    newest_applied,
)


@st.composite
def schedules(draw: st.DrawFn) -> SiteSchedule:
    fragments, between = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    return SiteSchedule(draw(st.integers(1, 200)), fragments * between, fragments, draw(st.integers(0, between)))


@st.composite
def histories(draw: st.DrawFn) -> tuple[SiteSchedule, list[SiteExchange]]:
    schedule = draw(schedules())
    return schedule, [BEGINNING, *exchanges_of(schedule)]


def exchanges_of(schedule: SiteSchedule) -> Iterator[SiteExchange]:
    exchange: SiteExchange | None = BEGINNING
    while exchange := schedule.after(exchange):
        yield exchange


@given(schedules())
def test_exchanges_lie_equally_far_apart(schedule: SiteSchedule) -> None:
    *usual, last = exchanges_of(schedule)
    between, total = schedule.interval_steps // schedule.fragments, schedule.total_steps
    assert [one.sent_at for one in usual] == list(range(between, total, between))
    assert [one.applied_at for one in usual] == [min(one.sent_at + schedule.delay_steps, total) for one in usual]
    assert (last.round, last.sent_at) == (len(usual) + 1, total)


@given(histories())
def test_one_exchange_is_on_its_way_at_a_time(history: tuple[SiteSchedule, list[SiteExchange]]) -> None:
    schedule, exchanges = history
    for earlier, later in pairwise(exchanges):
        assert earlier.sent_at <= earlier.applied_at <= later.sent_at
        assert earlier.sent_at < later.sent_at and later.round == earlier.round + 1
    assert exchanges[-1].sent_at == exchanges[-1].applied_at == schedule.total_steps
    assert exchanges[-1].fragments == tuple(range(schedule.fragments))
    assert sum(one.sent_at == schedule.total_steps for one in exchanges) == 1


@given(histories())
def test_fragments_go_in_turns(history: tuple[SiteSchedule, list[SiteExchange]]) -> None:
    schedule, (_, *exchanges, _) = history
    assert [one.fragments for one in exchanges] == [(n % schedule.fragments,) for n in range(len(exchanges))]


@given(histories(), st.data())
def test_a_checkpoint_has_applied_the_rounds_before_its_step(
    history: tuple[SiteSchedule, list[SiteExchange]], data: st.DataObject
) -> None:
    schedule, exchanges = history
    step = data.draw(st.integers(1, schedule.total_steps))
    newest = newest_applied(exchanges, step)
    assert exchanges[newest].applied_at < step
    assert newest == len(exchanges) - 1 or exchanges[newest + 1].applied_at >= step


def test_each_fragment_is_exchanged_every_interval() -> None:
    exchanges = list(exchanges_of(SiteSchedule(total_steps=100, interval_steps=30, fragments=3, delay_steps=4)))
    sent = {each.sent_at: each.fragments for each in exchanges[:-1]}
    assert sent == {10: (0,), 20: (1,), 30: (2,), 40: (0,), 50: (1,), 60: (2,), 70: (0,), 80: (1,), 90: (2,)}
    assert exchanges[0].applied_at == 14


def test_fragments_are_strided() -> None:
    assert [fragment_of(layer, 3) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert fragment_of(None, 3, is_input=True) == 0
    assert fragment_of(None, 3) == 2
