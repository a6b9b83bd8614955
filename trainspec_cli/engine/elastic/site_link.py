"""A rank's way to the other sites: through the meeting point, and directly where that is possible.

A thread of its own sends what it is given and keeps what arrives; where a connection breaks it connects anew. What the
meeting point has not decided yet is sent to it again; what does not come directly is asked of it. Nothing here waits
for the network on the training's own thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.core.wire.handshake import TIMEOUT_S
from trainspec_cli.core.wire.sites import (
    MEETING_POINT,
    Decided,
    Followed,
    Inboxes,
    Lacking,
    Message,
    Passed,
    Refused,
    Sent,
    SiteHello,
    Welcome,
    pack,
)
from trainspec_cli.engine.elastic.arriving_rounds import ArrivingRounds
from trainspec_cli.engine.elastic.direct_sites import DirectSites
from trainspec_cli.engine.elastic.site_connection import SiteAccess, SiteConnection
from trainspec_cli.recipe.canonical import from_plain
from trainspec_cli.wings.sites.decisions.round import RoundRecord


class SiteLink:
    def __init__(self, endpoint: str, secret: bytes, hello: SiteHello, applied: Callable[[], int], silence_s: float):
        """`applied` returns the newest round that was applied, which a new connection begins from."""
        access = SiteAccess(secret, lambda: replace(hello, applied=applied()), silence_s)
        self._site, self._silence_s = hello.site, silence_s
        self._meeting = SiteConnection(MEETING_POINT, endpoint, access, self._hear)
        self._rounds = ArrivingRounds(hello.site, applied())
        self._direct = DirectSites(access, self._rounds.hold, self._ask)
        self.is_member: bool | None = None
        """None: the meeting point has not answered yet."""
        self.record: RoundRecord | None = None
        """That of the round which was applied when the connection began."""
        self._pending: tuple[int, bytes] | None = None
        self._followed: int | None = None
        self._asked: set[tuple[int, int]] = set()
        """Round and site of what the meeting point was asked for over this connection."""
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(self._stay_connected())
        self._thread = threading.Thread(target=self._run, name="sites", daemon=True)
        self._thread.start()

    # Called by the training

    @property
    def refusal(self) -> Refused | None:
        return self._meeting.refusal

    @property
    def trouble(self) -> str:
        """Return why there is no connection to the meeting point; empty while there is one."""
        return self._meeting.trouble

    @property
    def sent_bytes(self) -> int:
        return sum(one.sent_bytes for one in (self._meeting, *self._direct.connections))

    @property
    def received_bytes(self) -> int:
        return sum(one.received_bytes for one in (self._meeting, *self._direct.connections))

    def cut_notices(self) -> list[str]:
        """Return what the user should know of the direct ways, and was not returned before."""
        notices = self._direct.notices
        return [notices.get() for _ in range(notices.qsize())]

    def send(self, message: Sent, payload: bytes) -> None:
        """Send an outer gradient to the sites that are reached, and to the meeting point, to that after each new
        connection too, until its round is decided."""
        self._call(lambda: self._send(message, payload))

    def follow(self, number: int) -> None:
        """Say that all rounds up to `number` were applied, by a site that is no member."""
        self._followed = number
        self._call(self._post_followed)

    def joined(self) -> None:
        """This site is a member from now on."""
        self.is_member, self._followed = True, None

    def has(self, number: int) -> bool:
        return self._rounds.has(number)

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, and the outer gradients by site; those before it are forgotten."""
        found = self._rounds.take(number)
        if self._pending and self._pending[0] <= number:
            self._pending = None
        return found

    def close(self) -> None:
        self._call(self._task.cancel)
        self._thread.join(TIMEOUT_S)

    def _call(self, act: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(act)

    # In the thread

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _stay_connected(self) -> None:
        self._direct.begin()
        try:
            await self._meeting.stay_connected()
        finally:
            await self._direct.close()

    def _send(self, message: Sent, payload: bytes) -> None:
        self._rounds.hold(message.round, self._site, payload)
        whole = replace(message, sha256=hashlib.sha256(payload).hexdigest())
        self._pending = message.round, self._direct.send(lambda sites: pack(replace(whole, direct=sites), payload))
        self._post_pending()

    def _hear(self, message: Message, payload: bytes) -> None:
        """Raise ValueError where a message does not fit."""
        if isinstance(message, Welcome):
            self.record = from_plain(RoundRecord, message.record) if message.record else None
            self.is_member, self._meeting.trouble = message.is_member, ""
            self._asked.clear()
            self._post_pending()
            self._post_followed()
        elif isinstance(message, Decided):
            record = from_plain(RoundRecord, message.record)
            self._rounds.decide(record, message.sha256, _cut(payload, message))
            self._ask()
            self._loop.call_later(self._silence_s, lambda: self._ask(record.round))
        elif isinstance(message, Passed):
            self._rounds.hold(message.round, message.site, payload)
        elif isinstance(message, Inboxes):
            self._direct.meet(message)
        else:
            raise ValueError(f"the meeting point does not say {type(message).__name__}")

    def _ask(self, patiently_awaited: int | None = None) -> None:
        """Ask the meeting point for what is lacking of decided rounds; what is on its direct way is waited for, but in
        the round `patiently_awaited` no longer."""
        for number, sites in self._rounds.lacking().items():
            waits = self._direct.trusted if number != patiently_awaited else set()
            if wanted := tuple(site for site in sites if site not in waits and (number, site) not in self._asked):
                self._asked |= {(number, site) for site in wanted}
                self._meeting.post(pack(Lacking(number, wanted)))

    def _post_pending(self) -> None:
        """Send what waits for its round, where the meeting point has answered."""
        if self._pending and self.is_member and not self.trouble:
            self._meeting.post(self._pending[1])

    def _post_followed(self) -> None:
        if self._followed is not None and not self.trouble:
            self._meeting.post(pack(Followed(self._followed)))


def _cut(payload: bytes, message: Decided) -> dict[int, bytes]:
    """Return the outer gradients by site. Raises ValueError where the sizes do not fit."""
    if sum(message.sizes) != len(payload) or len(message.sites) != len(message.sizes):
        raise ValueError("the sizes of outer gradients do not fit")
    cut, start = {}, 0
    for site, size in zip(message.sites, message.sizes, strict=True):
        cut[site] = payload[start : start + size]
        start += size
    return cut
