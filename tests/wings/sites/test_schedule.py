"""The order of fragments, the time of an exchange over a link, and the interval that hides it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.meeting import BEGINNING, SiteExchange, SiteSchedule, newest_applied
from trainspec_cli.wings.sites.outlook import VALUE_BYTES, SiteLinks, hiding_interval, utilisation


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
def test_exchanges_are_equally_spaced(schedule: SiteSchedule) -> None:
    *usual, last = exchanges_of(schedule)
    between, total = schedule.interval_steps // schedule.fragments, schedule.total_steps
    assert [one.sent_at for one in usual] == list(range(between, total, between))
    assert [one.applied_at for one in usual] == [min(one.sent_at + schedule.delay_steps, total) for one in usual]
    assert (last.round, last.sent_at) == (len(usual) + 1, total)


@given(histories())
def test_one_exchange_is_in_flight_at_a_time(history: tuple[SiteSchedule, list[SiteExchange]]) -> None:
    schedule, exchanges = history
    for earlier, later in pairwise(exchanges):
        assert earlier.sent_at <= earlier.applied_at <= later.sent_at
        assert earlier.sent_at < later.sent_at and later.round == earlier.round + 1
    assert exchanges[-1].sent_at == exchanges[-1].applied_at == schedule.total_steps
    assert exchanges[-1].fragments == tuple(range(schedule.fragments))
    assert sum(one.sent_at == schedule.total_steps for one in exchanges) == 1


@given(histories())
def test_fragments_alternate(history: tuple[SiteSchedule, list[SiteExchange]]) -> None:
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


def test_the_link_of_the_meeting_point_carries_everything() -> None:
    two, four = SiteLinks(2, bytes_per_s=1e6, delay_s=0.05), SiteLinks(4, 1e6, 0.05)
    assert two.exchange_s(1e6) == pytest.approx(0.1 + 1.0), "both directions at the same time"
    assert four.exchange_s(1e6) == pytest.approx(0.1 + 9.0)
    assert four.carried_bytes(1.0) == 3 + 9
    assert two.all_reduce_s(4e6) == pytest.approx(2 * (2.0 + 0.05))


def test_direct_links_carry_the_outer_gradients_of_the_others() -> None:
    four = SiteLinks(4, bytes_per_s=1e6, delay_s=0.05, direct=True)
    assert four.exchange_s(1e6) == pytest.approx(0.1 + 3.0)
    assert four.carried_bytes(1.0) == 3 + 3
    both = [SiteLinks(2, 1e6, 0.05, direct=direct) for direct in (False, True)]
    assert both[0].exchange_s(1e6) == both[1].exchange_s(1e6), "the meeting point is at one of the two"


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0.001, 10), st.floats(0, 1000))
def test_a_utilisation_is_at_most_1_and_grows_with_the_delay(
    between: int, delay: int, step_s: float, exchange_s: float
) -> None:
    part = utilisation(between, delay, step_s, exchange_s)
    assert 0 < part <= 1
    assert utilisation(between, delay + 1, step_s, exchange_s) >= part


def test_the_shortest_interval_that_hides_an_exchange_is_found() -> None:
    found = hiding_interval(fragments=4, step_s=1.0, exchange_s=9.5, wanted=0.95)
    assert found == 40
    assert utilisation(10, 10, 1.0, 9.5) >= 0.95 > utilisation(5, 5, 1.0, 9.5)
    assert hiding_interval(4, 1.0, 1e9, 0.95) is None


def test_the_bytes_of_a_value_are_those_of_the_codec() -> None:
    torch = pytest.importorskip("torch")
    from trainspec_cli.engine.comm.codec import GRADIENT_CODECS

    values = 64 * 128
    for name, value_bytes in VALUE_BYTES.items():
        sent = GRADIENT_CODECS[name].encode(torch.ones(1, values)).numel()
        assert sent - 4 <= value_bytes * values <= sent
