"""The inbox of a site: other sites send it their outer gradients directly, and it hands them to the site's own ranks.

It keeps nothing. What comes while a rank is away, or breaks off, that rank gets from the meeting point. It runs in a
thread beside the supervisor of its site, over the starts of its workers.
"""

from __future__ import annotations

from typing import TextIO

from trainspec_cli.core.wire.sites import Gone, Message, Passed, Refused, Sent, SiteHello, inbox_of
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.wings.sites.connections import RankConnection
from trainspec_cli.wings.sites.decisions.agreement import agreement_of
from trainspec_cli.wings.sites.server import SiteServer


class SiteInbox:
    def __init__(self, site: int, sites: int, secret: bytes, recipe: str, silence_s: float, log: TextIO):
        """`recipe` is the digest of what all sites have to agree on."""
        self._site, self._count, self._recipe, self._silence_s = site, sites, recipe, silence_s
        self._server = SiteServer(inbox_of(site), self, secret, log)
        self.start, self.close, self._say = self._server.start, self._server.close, self._server.say
        self._ranks: dict[tuple[int, int], RankConnection] = {}
        """Those of this site and of the others, by site and rank."""

    def turn(self) -> None:
        for connection in list(self._ranks.values()):
            if connection.silent(self._silence_s):
                connection.abort()

    def lingers(self, closed_for_s: float) -> bool:
        return False

    def abort(self) -> None:
        for connection in self._ranks.values():
            connection.abort()

    def refusal(self, hello: SiteHello) -> Refused | None:
        if hello.recipe != self._recipe:
            return Refused("its recipe differs from that of this site", "give all sites the same recipe")
        if not 0 <= hello.site < self._count or not 0 <= hello.rank < hello.ranks:
            return Refused(f"there are {self._count} sites, from 0", "type another --site")
        return None

    def arrive(self, hello: SiteHello, connection: RankConnection) -> None:
        key = hello.site, hello.rank
        if before := self._ranks.get(key):
            before.abort()  # a new start, whose last connection has not been found broken yet
        self._ranks[key] = connection
        if hello.site != self._site and hello.rank == 0:
            self._say(f"site {hello.site} is connected directly")

    def hear(self, hello: SiteHello, message: Message, payload: bytes) -> None:
        if not isinstance(message, Sent) or hello.site == self._site:
            raise ValueError(f"{type(message).__name__} is not for an inbox")
        if own := self._ranks.get((self._site, hello.rank)):
            own.send(Passed(message.round, hello.site), payload)

    def leave(self, hello: SiteHello, connection: RankConnection) -> None:
        key = hello.site, hello.rank
        if self._ranks.get(key) is connection:
            del self._ranks[key]
        if hello.site == self._site:
            return
        if own := self._ranks.get((self._site, hello.rank)):
            own.send(Gone(hello.site))
        if hello.rank == 0:
            self._say(f"site {hello.site} is not connected directly any more")


def make_inbox(plan: Plan, secret: bytes, log: TextIO) -> SiteInbox:
    resilience = plan.spec.resilience
    site, sites = resilience.sites.site, resilience.sites.count
    assert site is not None, "a site is started with its number"
    return SiteInbox(site, sites, secret, agreement_of(plan), resilience.heartbeat_timeout_s, log)
