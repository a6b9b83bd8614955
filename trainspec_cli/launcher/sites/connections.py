"""The connections of the meeting point: one for each rank of each site."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from trainspec_cli.wire.sites import Alive, Message, Sent, SiteHello, pack

BEAT_S = 1.0


class RankConnection:
    """A rank of a site that has proved that it knows the secret."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.heard_s = time.monotonic()

    def hear(self) -> None:
        self.heard_s = time.monotonic()

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Send when what was sent before is on its way."""
        self._outbox.put_nowait(pack(message, payload))

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
    def is_complete(self) -> bool:
        return all(len(self.ranks) == hello.ranks for hello in self.hellos.values())

    def silent(self, silence_s: float) -> bool:
        return any(time.monotonic() > rank.heard_s + silence_s for rank in self.ranks.values())

    def abort(self) -> None:
        for rank in self.ranks.values():
            rank.abort()
