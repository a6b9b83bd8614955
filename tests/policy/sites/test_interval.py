"""How often sites exchange, by what exchanges need."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.policy.sites.interval import LOOKS, WANTED, follow_links, needed_steps
from trainspec_cli.policy.sites.link import utilisation
from trainspec_cli.policy.sites.schedule import SiteCadence, SiteSchedule

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
