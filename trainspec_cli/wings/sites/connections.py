"""The connections of ranks to the meeting point, or to the inbox of a site."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from trainspec_cli.core.wire.sites import Alive, Message, Sent, SiteHello, pack

BEAT_S = 1.0


class RankConnection:
    """A rank of a site that has proved that it knows the secret."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.heard_s = time.monotonic()
        self.passed: dict[int, str] = {}
        """The digest of the newest outer gradient of each site that was passed on to it."""

    def hear(self) -> None:
        self.heard_s = time.monotonic()

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send when what was sent before is on its way."""
        self.send_packed(pack(message, payload))

    def send_packed(self, content: bytes) -> None:
        self._outbox.put_nowait(content)

    async def write(self) -> None:
        """Write what is to be sent, for ever."""
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    content = await self._outbox.get()
            except TimeoutError:
                content = pack(Alive())
            self._writer.write(content)
            await self._writer.drain()

    async def flush(self) -> None:
        """Write what is to be sent now, and no more."""
        while not self._outbox.empty():
            self._writer.write(self._outbox.get_nowait())
        await self._writer.drain()

    def silent(self, silence_s: float) -> bool:
        return time.monotonic() > self.heard_s + silence_s

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass
class ConnectedSite:
    """A site, as far as its ranks are connected."""

    ranks: dict[int, RankConnection] = field(default_factory=dict)
    hellos: dict[int, SiteHello] = field(default_factory=dict)
    sent: dict[int, tuple[Sent, bytes]] = field(default_factory=dict)
    """What each rank has sent for the next round."""
    followed: dict[int, int] = field(default_factory=dict)
    is_welcome: bool = False
    """All ranks are there, and have been answered."""

    @property
    def inbox(self) -> str:
        """Return the address of its inbox; empty: it has none."""
        return next(iter(self.hellos.values())).listen

    @property
    def is_complete(self) -> bool:
        return all(len(self.ranks) == hello.ranks for hello in self.hellos.values())

    def silent(self, silence_s: float) -> bool:
        return any(rank.silent(silence_s) for rank in self.ranks.values())

    def abort(self) -> None:
        for rank in self.ranks.values():
            rank.abort()
