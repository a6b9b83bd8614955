"""Which fragment goes when, how long an exchange takes over a link, and the interval that hides it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.schedule import (
    BEGINNING,
    LOOKS,
    VALUE_BYTES,
    WANTED,
    SiteCadence,
    SiteExchange,
    SiteLinks,
    SiteSchedule,
    follow_links,
    fragment_of,
    hiding_interval,
    needed_steps,
    newest_applied,
    utilisation,
)


@st.composite
def schedules(draw: st.DrawFn) -> SiteSchedule:
    fragments, between = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    return SiteSchedule(draw(st.integers(1, 200)), fragments * between, fragments, draw(st.integers(0, between)))


@st.composite
def histories(draw: st.DrawFn) -> tuple[SiteSchedule, list[SiteExchange]]:
    """The exchanges of a run whose cadence changes in any way."""
    schedule = draw(schedules())

    def cadence() -> SiteCadence:
        between = draw(st.integers(1, 12))
        return SiteCadence(schedule.fragments * between, draw(st.integers(0, between)))

    exchanges = [BEGINNING]
    while following := schedule.after(exchanges[-1], cadence()):
        exchanges.append(following)
    return schedule, exchanges


def unchanged(schedule: SiteSchedule) -> Iterator[SiteExchange]:
    exchange: SiteExchange | None = BEGINNING
    while exchange := schedule.after(exchange, schedule.cadence):
        yield exchange


@given(schedules())
def test_exchanges_lie_equally_far_apart_where_nothing_changes(schedule: SiteSchedule) -> None:
    *usual, last = unchanged(schedule)
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
def test_fragments_go_in_turns_whatever_changes(history: tuple[SiteSchedule, list[SiteExchange]]) -> None:
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
    exchanges = list(unchanged(SiteSchedule(total_steps=100, interval_steps=30, fragments=3, delay_steps=4)))
    sent = {each.sent_at: each.fragments for each in exchanges[:-1]}
    assert sent == {10: (0,), 20: (1,), 30: (2,), 40: (0,), 50: (1,), 60: (2,), 70: (0,), 80: (1,), 90: (2,)}
    assert exchanges[0].applied_at == 14


def test_a_shorter_interval_waits_for_what_is_on_its_way() -> None:
    schedule = SiteSchedule(total_steps=100, interval_steps=2, fragments=1, delay_steps=2)
    exchange = schedule.after(SiteExchange(3, (0,), 30, 45), SiteCadence(interval_steps=10, delay_steps=8))
    assert exchange == SiteExchange(4, (0,), 45, 53)


def test_fragments_are_strided() -> None:
    assert [fragment_of(layer, 3) for layer in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert fragment_of(None, 3, is_input=True) == 0
    assert fragment_of(None, 3) == 2


def test_the_link_of_the_meeting_point_carries_all_that_the_sites_send() -> None:
    two, four = SiteLinks(2, bytes_per_s=1e6, delay_s=0.05), SiteLinks(4, 1e6, 0.05)
    assert two.exchange_s(1e6) == pytest.approx(0.1 + 1.0), "out while it goes in"
    assert four.exchange_s(1e6) == pytest.approx(0.1 + 9.0)
    assert four.carried_bytes(1.0) == 3 + 9
    assert two.all_reduce_s(4e6) == pytest.approx(2 * (2.0 + 0.05))


def test_direct_links_carry_what_the_others_have_sent() -> None:
    four = SiteLinks(4, bytes_per_s=1e6, delay_s=0.05, direct=True)
    assert four.exchange_s(1e6) == pytest.approx(0.1 + 3.0)
    assert four.carried_bytes(1.0) == 3 + 3
    both = [SiteLinks(2, 1e6, 0.05, direct=direct) for direct in (False, True)]
    assert both[0].exchange_s(1e6) == both[1].exchange_s(1e6), "the meeting point is at one of the two"


@given(st.integers(1, 100), st.integers(0, 100), st.floats(0.001, 10), st.floats(0, 1000))
def test_no_site_trains_more_than_all_the_time(between: int, delay: int, step_s: float, exchange_s: float) -> None:
    part = utilisation(between, delay, step_s, exchange_s)
    assert 0 < part <= 1
    assert utilisation(between, delay + 1, step_s, exchange_s) >= part


def test_the_shortest_interval_that_hides_an_exchange_is_found() -> None:
    found = hiding_interval(fragments=4, step_s=1.0, exchange_s=9.5, wanted=0.95)
    assert found == 40
    assert utilisation(10, 10, 1.0, 9.5) >= 0.95 > utilisation(5, 5, 1.0, 9.5)
    assert hiding_interval(4, 1.0, 1e9, 0.95) is None


def test_bytes_of_a_value_are_those_that_the_codec_sends() -> None:
    torch = pytest.importorskip("torch")
    from trainspec_cli.engine.comm.codec import GRADIENT_CODECS

    values = 64 * 128
    for name, value_bytes in VALUE_BYTES.items():
        sent = GRADIENT_CODECS[name].encode(torch.ones(1, values)).numel()
        assert sent - 4 <= value_bytes * values <= sent


SCHEDULE = SiteSchedule(total_steps=10_000, interval_steps=40, fragments=4, delay_steps=2, max_interval_steps=400)


def followed(needs: list[float], schedule: SiteSchedule = SCHEDULE) -> list[SiteCadence]:
    """Return the cadence after each of a run's exchanges."""
    now, seen, cadences = schedule.cadence, list[float](), []
    for needed in needs:
        seen.append(needed)
        now, _ = follow_links(schedule, now, seen)
        cadences.append(now)
    return cadences


def test_an_exchange_that_is_waited_for_is_given_more_steps_and_then_a_longer_interval() -> None:
    assert followed([8.0] * LOOKS)[-1] == SiteCadence(interval_steps=40, delay_steps=9), "9 of the 10 between hide it"
    assert followed([49.0] * LOOKS)[-1] == SiteCadence(interval_steps=54 * 4, delay_steps=54)


def test_it_says_why() -> None:
    _, reason = follow_links(SCHEDULE, SCHEDULE.cadence, [50.0] * LOOKS)
    assert reason == "exchanges take 50.0 steps over the slowest link, and 2 hid them"
    _, reason = follow_links(SCHEDULE, SiteCadence(220, 55), [4.0, 9.0, 5.0])
    assert reason == "exchanges take 9.0 steps at most over the slowest link, and had 55"


def test_it_goes_back_when_the_link_has_recovered() -> None:
    cadences = followed([49.0] * 10 + [1.0] * 10)
    assert cadences[9] == SiteCadence(216, 54)
    assert cadences[-1] == SCHEDULE.cadence


@pytest.mark.parametrize("outlier", [0.01, 500.0])
def test_one_exchange_among_others_changes_nothing(outlier: float) -> None:
    steady = followed([50.0] * 10)[-1]
    assert set(followed([50.0] * 10 + [outlier] + [50.0] * 10)[LOOKS:]) == {steady}


@pytest.mark.parametrize("needed", [0.4, 1.9, 2.5, 9.0, 10.5, 35.0, 99.0, 300.0])
def test_it_does_not_swing(needed: float) -> None:
    draw = random.Random(1)
    cadences = followed([needed * draw.uniform(0.85, 1.15) for _ in range(2000)])
    changes = [one for one, after in pairwise(cadences) if one != after]
    assert len(changes) <= 2
    settled = cadences[-1]
    if needed < 100:
        assert utilisation(settled.interval_steps // 4, settled.delay_steps, 1.0, needed) >= WANTED


@given(st.lists(st.floats(1e-6, 1e9), max_size=40), st.integers(1, 5), st.integers(1, 9), st.data())
def test_it_stays_within_what_the_recipe_allows(needs: list[float], fragments: int, least: int, data) -> None:
    most, delay = data.draw(st.integers(least, 50)), data.draw(st.integers(0, least))
    schedule = SiteSchedule(1000, least * fragments, fragments, delay, most * fragments)
    for cadence in followed(needs, schedule):
        assert least * fragments <= cadence.interval_steps <= most * fragments
        assert cadence.interval_steps % fragments == 0
        assert delay <= cadence.delay_steps <= cadence.interval_steps // fragments


def test_an_interval_that_is_not_to_change_does_not() -> None:
    fixed = SiteSchedule(total_steps=100, interval_steps=40, fragments=4, delay_steps=2)
    assert set(followed([50.0] * 10, fixed)) == {fixed.cadence}


def test_the_slowest_link_and_the_slowest_site_count() -> None:
    assert needed_steps({0: 0.1, 1: 12.0}, {0: 0.5, 1: 2.0}) == 6.0


@pytest.mark.parametrize("unknown", [0.0, -1.0, inf, nan])
def test_what_is_not_measured_says_nothing(unknown: float) -> None:
    assert needed_steps({0: 0.1, 1: unknown}, {0: 0.5, 1: 2.0}) is None
    assert needed_steps({0: 0.1, 1: 1.0}, {0: unknown, 1: 2.0}) is None
    assert needed_steps({}, {}) is None
