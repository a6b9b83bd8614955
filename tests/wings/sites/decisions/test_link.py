"""What hides an exchange behind a link."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainspec_cli.wings.sites.decisions.link import VALUE_BYTES, SiteLinks, hiding_interval, utilisation


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
