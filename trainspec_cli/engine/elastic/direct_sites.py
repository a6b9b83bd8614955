"""The direct ways between sites: what a rank sends to the inboxes of others, and what comes into its own site's.

The meeting point is beside site 0, so nothing goes to site 0 or from it on a direct way: that would be the same link
once more.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable

from trainspec_cli.core.wire.sites import Gone, Inboxes, Message, Passed, inbox_of
from trainspec_cli.engine.elastic.site_connection import SiteAccess, SiteConnection
from trainspec_cli.recipe.keys.resilience import FIRST_SITE

THROUGH = "through the meeting point"


class DirectSites:
    """All but `notices` is called in the thread of the connections."""

    def __init__(
        self,
        access: SiteAccess,
        arrived: Callable[[int, int, bytes], None],
        broken: Callable[[], None],
    ):
        """`arrived` is called with the round, the site and the outer gradient that has come; `broken` where a way that
        it would have come on has ended."""
        hello = access.hello()
        self._site, self._listen, self._access = hello.site, hello.listen, access
        self._arrived, self._broken = arrived, broken
        self.trusted: set[int] = set()
        """Sites whose direct way to this one has brought something, and has not broken since."""
        self.notices: queue.SimpleQueue[str] = queue.SimpleQueue()
        """What the user should know; each once."""
        self._said: set[str] = set()
        self._inbox: SiteConnection | None = None
        self._others: dict[int, SiteConnection] = {}
        self._tasks: dict[SiteConnection, asyncio.Task[None]] = {}

    @property
    def connections(self) -> tuple[SiteConnection, ...]:
        return tuple(self._tasks)

    def begin(self) -> None:
        """Connect to this site's own inbox, where it has one."""
        if self._listen:
            self._inbox = self._connect(inbox_of(self._site), self._listen, self._hear, self._lose_inbox)

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def meet(self, inboxes: Inboxes) -> None:
        """Connect to the other sites' inboxes, as far as they have any."""
        addresses = dict(zip(inboxes.sites, inboxes.addresses, strict=True))
        others = {
            site: at for site, at in addresses.items() if FIRST_SITE not in (site, self._site) and site != self._site
        }
        if others and not self._listen:
            self._say("listen", f"this site listens nowhere (--site-listen): what others send comes {THROUGH}")
        for site, address in others.items():
            if not address:
                self._say(f"{site}", f"site {site} listens nowhere (--site-listen): what this one sends goes {THROUGH}")
            elif site not in self._others or self._others[site].address != address:
                self._meet(site, address)

    def send(self, packed: Callable[[tuple[int, ...]], bytes]) -> bytes:
        """Send a message to all sites that are reached, and return it. `packed` makes it, with their numbers.

        A site that still gets what was sent before is left out, so that no more than one message waits for it.
        """
        behind = {site for site, connection in self._others.items() if connection.is_behind}
        for site in sorted(behind):
            why = f"the direct way to site {site} is so slow that it still carries what was sent before"
            self._say(f"{site} behind", f"{why}: what follows goes {THROUGH}")
        reached = tuple(site for site, connection in self._others.items() if connection.is_open and site not in behind)
        content = packed(reached)
        for site in reached:
            self._others[site].post(content)
        return content

    def _meet(self, site: int, address: str) -> None:
        if before := self._others.pop(site, None):
            self._tasks.pop(before).cancel()

        def lose() -> None:
            why = f"site {site} is not reached directly at {address} ({connection.trouble})"
            self._say(f"{site}", f"{why}: what this one sends goes {THROUGH}")

        connection = self._others[site] = self._connect(inbox_of(site), address, _refuse, lose)

    def _connect(
        self, server: str, address: str, hear: Callable[[Message, bytes], None], lost: Callable[[], None]
    ) -> SiteConnection:
        connection = SiteConnection(server, address, self._access, hear)
        connection.lost = lost
        self._tasks[connection] = asyncio.ensure_future(connection.stay_connected())
        return connection

    def _hear(self, message: Message, payload: bytes) -> None:
        if isinstance(message, Passed):
            self._arrived(message.round, message.site, payload)
            self.trusted.add(message.site)
        elif isinstance(message, Gone):
            self.trusted.discard(message.site)
            self._broken()
        else:
            _refuse(message, payload)

    def _lose_inbox(self) -> None:
        assert self._inbox is not None, "it was connected to"
        why = f"this site's own inbox is not reached at {self._listen} ({self._inbox.trouble})"
        self._say("inbox", f"{why}: what others send comes {THROUGH}")
        self.trusted.clear()
        self._broken()

    def _say(self, about: str, message: str) -> None:
        if about not in self._said:
            self._said.add(about)
            self.notices.put(message)


def _refuse(message: Message, payload: bytes) -> None:
    raise ValueError(f"an inbox does not say {type(message).__name__}")
