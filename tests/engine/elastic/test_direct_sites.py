"""A rank's ways to the inboxes of other sites: real ones, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from lab.link import Link

from trainspec_cli.core.wire.sites import Inboxes, Sent, SiteHello, pack
from trainspec_cli.engine.elastic.direct_sites import DirectSites
from trainspec_cli.engine.elastic.site_connection import SiteAccess
from trainspec_cli.run.job.place import listen
from trainspec_cli.wings.sites.inbox import SiteInbox

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
    """Send as soon as the site is reached."""
    reached: tuple[int, ...] = ()

    def packed(sites: tuple[int, ...]) -> bytes:
        nonlocal reached
        reached = sites
        return message(content)

    while not reached:
        await asyncio.sleep(0.01)
        ways.send(packed)


def test_no_more_than_one_message_waits_for_a_slow_way(port: int) -> None:
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
    (said,) = notices
    assert "site 2 is so slow" in said and "through the meeting point" in said


def test_a_site_of_another_recipe_is_refused_and_said(port: int) -> None:
    async def meet() -> str:
        ways = ways_of(1, "another recipe")
        ways.meet(Inboxes((2,), (f"127.0.0.1:{port}",)))
        ways.notices.get()
        while ways.notices.empty():
            await asyncio.sleep(0.01)
        await ways.close()
        return ways.notices.get()

    assert "its recipe differs from that of this site" in asyncio.run(meet())


def test_site_0_has_no_ways_but_the_meeting_point(port: int) -> None:
    async def meet(site: int) -> int:
        ways = ways_of(site)
        ways.meet(Inboxes((0, 1, 2), ("", "", f"127.0.0.1:{port}")))
        connections = len(ways.connections)
        await ways.close()
        return connections

    assert [asyncio.run(meet(site)) for site in range(3)] == [0, 1, 0]
