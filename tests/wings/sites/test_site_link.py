"""A rank's connections to other sites: real inboxes over real sockets, and rounds that arrive in pieces, in any
order."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.link import Link

from trainspec_cli.run.job.machine import listen
from trainspec_cli.wings.sites.engine.site_link import HELD_ROUNDS, ArrivingRounds, DirectSites, SiteAccess
from trainspec_cli.wings.sites.meeting import RoundRecord, SiteExchange
from trainspec_cli.wings.sites.messages import Inboxes, Sent, SiteHello, pack
from trainspec_cli.wings.sites.server import SiteInbox

pytest.importorskip("cryptography")

SECRET, RECIPE = bytes(32), "recipe"


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """The port of the inbox of site 2."""
    listener = listen("127.0.0.1")
    with (tmp_path / "log").open("w") as log:
        inbox = SiteInbox(2, 3, SECRET, RECIPE, 60.0, log)
        inbox.start(listener)
        yield listener.getsockname()[1]
        inbox.close()


def ways_of(site: int, recipe: str = RECIPE) -> DirectSites:
    hello = SiteHello(site, 0, 1, 4, 0, recipe)
    return DirectSites(SiteAccess(SECRET, lambda: hello, 60.0), lambda *_: None, lambda: None)


def message(content: bytes) -> bytes:
    return pack(Sent(1, 1, 1, 0.0, "", 0), content)


async def until_sent(ways: DirectSites, content: bytes) -> None:
    """Send as soon as the site is connected."""
    reached: tuple[int, ...] = ()

    def packed(sites: tuple[int, ...]) -> bytes:
        nonlocal reached
        reached = sites
        return message(content)

    while not reached:
        await asyncio.sleep(0.01)
        ways.send(packed)


def test_at_most_one_message_is_queued_for_a_slow_connection(port: int) -> None:
    async def send_twice() -> tuple[list[tuple[int, ...]], list[str]]:
        ways, reached = ways_of(1), list[tuple[int, ...]]()
        link = Link(port, bytes_per_s=1e6)
        ways.meet(Inboxes((0, 1, 2), ("", "", f"127.0.0.1:{link.port}")))
        ways.notices.get()  # this site has no inbox
        await until_sent(ways, bytes(30_000_000))
        for _ in range(2):
            ways.send(lambda sites: reached.append(sites) or message(b""))  # type: ignore[func-returns-value]
        await ways.close()
        return reached, [ways.notices.get() for _ in range(ways.notices.qsize())]

    reached, notices = asyncio.run(send_twice())
    assert reached == [(), ()]
    (notice,) = notices
    assert "site 2" in notice and "meeting point" in notice


def test_a_site_with_another_recipe_is_refused_with_a_notice(port: int) -> None:
    async def meet() -> str:
        ways = ways_of(1, "another recipe")
        ways.meet(Inboxes((2,), (f"127.0.0.1:{port}",)))
        ways.notices.get()
        while ways.notices.empty():
            await asyncio.sleep(0.01)
        await ways.close()
        return ways.notices.get()

    assert "recipe" in asyncio.run(meet())


def test_site_0_only_uses_the_meeting_point(port: int) -> None:
    async def meet(site: int) -> int:
        ways = ways_of(site)
        ways.meet(Inboxes((0, 1, 2), ("", "", f"127.0.0.1:{port}")))
        connections = len(ways.connections)
        await ways.close()
        return connections

    assert [asyncio.run(meet(site)) for site in range(3)] == [0, 1, 0]


# A round is complete when every merged outer gradient has arrived, and no other one replaces it.

OWN = 0


def decided(number: int, *sites: int) -> RoundRecord:
    exchange = SiteExchange(number, (0,), sent_at=number, applied_at=number)
    return RoundRecord(exchange, None, included=sites, weights=(1.0,) * len(sites))


def digests(*contents: bytes) -> tuple[str, ...]:
    return tuple(hashlib.sha256(content).hexdigest() for content in contents)


def test_gradients_from_before_the_decision_are_taken_with_it() -> None:
    rounds = ArrivingRounds(OWN, 0)
    rounds.hold(1, OWN, b"own")
    rounds.hold(1, 2, b"two")
    assert not rounds.has(1) and rounds.lacking() == {}
    rounds.decide(decided(1, 0, 1, 2), digests(b"own", b"one", b"two"), {1: b"one"})
    assert rounds.has(1)
    assert rounds.take(1)[1] == {1: b"one", 2: b"two"}, "the training holds its own"


def test_another_gradient_of_the_same_round_does_not_replace_it() -> None:
    rounds = ArrivingRounds(OWN, 0)
    rounds.hold(1, 1, b"of its first start")
    rounds.hold(1, OWN, b"of this start")
    rounds.decide(decided(1, 0, 1), digests(b"of the start before", b"of its second start"), {})
    assert rounds.lacking() == {1: (0, 1)}
    rounds.hold(1, 1, b"of its second start")
    assert rounds.lacking() == {1: (0,)}
    rounds.decide(decided(1, 0, 1), (), {0: b"of the start before"})
    assert rounds.take(1)[1] == {0: b"of the start before", 1: b"of its second start"}


def test_rounds_that_were_taken_or_are_far_ahead_are_not_held() -> None:
    rounds = ArrivingRounds(OWN, 5)
    for number in (5, 6 + HELD_ROUNDS):
        rounds.hold(number, 1, b"x")
        rounds.decide(decided(number, 1), digests(b"x"), {})
        assert not rounds.has(number)


@given(st.permutations(["early 1", "early 2", "decision", "asked"]))
def test_the_same_bytes_are_taken_in_any_order_of_arrival(order: list[str]) -> None:
    rounds = ArrivingRounds(3, 0)
    for what in order:
        if what == "decision":
            rounds.decide(decided(1, 1, 2), digests(b"one", b"two"), {})
        elif what == "asked":
            rounds.decide(decided(1, 1, 2), digests(b"one", b"two"), {2: b"two"})
        else:
            rounds.hold(1, int(what[-1]), b"one" if what == "early 1" else b"damaged")
    assert rounds.take(1)[1] == {1: b"one", 2: b"two"}
