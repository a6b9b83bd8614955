"""The servers of distant sites, each in a separate thread: the inbox, and the common parts of the inbox and the
meeting point.

A server accepts clients that prove, inside TLS, that they know the sites' secret and expect this server. It forwards
their messages. It runs next to its site's supervisor, across worker restarts."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.wire.handshake import Challenge
from trainspec_cli.recipe.results.plan import Plan
from trainspec_cli.run.rendezvous.handshakes import BAD_REQUEST, Handshakes, prove
from trainspec_cli.wings.sites.meeting import agreement_of
from trainspec_cli.wings.sites.messages import (
    BEAT_S,
    GREETING,
    LINE_BYTES,
    Alive,
    Gone,
    Message,
    Passed,
    Refused,
    Sent,
    SiteHello,
    inbox_of,
    make_certificate,
    pack,
    receive,
)


class RankConnection:
    """The connection of a rank that has proved that it knows the secret."""

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer = writer
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self.active_s = time.monotonic()
        self.passed: dict[int, str] = {}
        """For each site, the digest of its newest outer gradient that was forwarded to the rank."""

    def note_activity(self) -> None:
        self.active_s = time.monotonic()

    def send(self, message: Message, payload: bytes = b"") -> None:
        """Queue a message behind the messages that are already queued."""
        self.send_packed(pack(message, payload))

    def send_packed(self, content: bytes) -> None:
        self._outbox.put_nowait(content)

    async def write(self) -> None:
        """Write queued messages until this task is cancelled."""
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    content = await self._outbox.get()
            except TimeoutError:
                content = pack(Alive())
            self._writer.write(content)
            await self._writer.drain()

    async def flush(self) -> None:
        """Write the messages that are currently queued."""
        while not self._outbox.empty():
            self._writer.write(self._outbox.get_nowait())
        await self._writer.drain()

    def silent(self, silence_s: float) -> bool:
        return time.monotonic() > self.active_s + silence_s

    def abort(self) -> None:
        self._writer.transport.abort()


@dataclass
class ConnectedSite:
    """A site and its connected ranks."""

    ranks: dict[int, RankConnection] = field(default_factory=dict)
    hellos: dict[int, SiteHello] = field(default_factory=dict)
    sent: dict[int, tuple[Sent, bytes]] = field(default_factory=dict)
    """Each rank's message for the next round."""
    followed: dict[int, int] = field(default_factory=dict)
    is_welcome: bool = False
    """True if all ranks are connected and have been answered."""

    @property
    def inbox(self) -> str:
        """The address of the site's inbox; empty if it has none."""
        return next(iter(self.hellos.values())).listen

    @property
    def is_complete(self) -> bool:
        return all(len(self.ranks) == hello.ranks for hello in self.hellos.values())

    def abort(self) -> None:
        for rank in self.ranks.values():
            rank.abort()


TICK_S = 0.05
ENDS = (*BAD_REQUEST, OSError, EOFError, TrainspecError, asyncio.CancelledError)


class Served(Protocol):
    """The behaviour of a server. All methods are called in the server's thread."""

    def refusal(self, hello: SiteHello) -> Refused | None: ...

    def arrive(self, hello: SiteHello, connection: RankConnection) -> None: ...

    def handle(self, hello: SiteHello, message: Message, payload: bytes) -> None:
        """Handle a message. Raises one of `BAD_REQUEST`, or OSError, to end the connection."""

    def leave(self, hello: SiteHello, connection: RankConnection) -> None: ...

    def tick(self) -> None:
        """Do whatever is due. This is called repeatedly."""

    def lingers(self, closed_for_s: float) -> bool:
        """Return whether to continue although the server was asked to end `closed_for_s` seconds ago."""

    def abort(self) -> None:
        """End all connections."""


class SiteServer:
    def __init__(self, name: str, served: Served, secret: bytes, log: TextIO):
        """`name`: the server's name in the proofs of both ends."""
        self._name = name
        self._served = served
        self._secret = secret
        self._file = log
        self._certificate = make_certificate()
        self._handshakes = Handshakes(log)
        self._loop = asyncio.new_event_loop()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, listener: socket.socket) -> None:
        self._thread = threading.Thread(
            target=lambda: self._loop.run_until_complete(self._serve(listener)), name=self._name, daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        if self._thread:
            self._thread.join()
        self._loop.close()

    def log(self, text: str) -> None:
        print(f"sites: {text}", file=self._file, flush=True)

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve_connection, sock=listener, limit=LINE_BYTES)
        closing_s: float | None = None
        while closing_s is None or self._served.lingers(self._loop.time() - closing_s):
            self._served.tick()
            await asyncio.sleep(TICK_S)
            if self._closing.is_set() and closing_s is None:
                closing_s = self._loop.time()
        server.close()
        self._served.abort()
        # The event loop ends with this coroutine, so first cancel the connection tasks that are still running.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. An error is logged, and ends only this connection."""
        connection = RankConnection(writer)
        hello: SiteHello | None = None
        try:
            async with self._handshakes.limited():
                writer.write(GREETING)
                await writer.start_tls(self._certificate.context)
                await prove(reader, writer, Challenge(self._secret, self._certificate.purpose(self._name)))
                first, _ = await receive(reader, connection.note_activity)
                if not isinstance(first, SiteHello):
                    raise ValueError("a rank's first message must be hello")
                if refusal := self._served.refusal(first):
                    self.log(f"site {first.site} is rejected: {refusal.reason}")
                    connection.send(refusal)
                    await connection.flush()
                    return
                hello = first
            self._served.arrive(hello, connection)
            writing = asyncio.ensure_future(connection.write())
            try:
                while True:
                    message, payload = await receive(reader, connection.note_activity)
                    if not isinstance(message, Alive):
                        self._served.handle(hello, message, payload)
            finally:
                writing.cancel()
        except ENDS as error:
            self._handshakes.note_refusal("sites", writer, error)
        finally:
            if hello is not None:
                self._served.leave(hello, connection)
            writer.transport.abort()


class SiteInbox:
    """Receives outer gradients directly from other sites, and forwards them to the ranks of its own site.

    It stores nothing, because ranks request from the meeting point what they have missed."""

    def __init__(self, site: int, sites: int, secret: bytes, recipe: str, silence_s: float, log: TextIO):
        """`recipe`: a digest of everything that all sites must agree on."""
        self._site = site
        self._count = sites
        self._recipe = recipe
        self._silence_s = silence_s
        self._server = SiteServer(inbox_of(site), self, secret, log)
        self.start = self._server.start
        self.close = self._server.close
        self._log = self._server.log
        self._ranks: dict[tuple[int, int], RankConnection] = {}
        """Connected ranks of this site and of other sites, by site and rank."""

    def tick(self) -> None:
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
            return Refused("the site's recipe differs from that of this site", "give all sites the same recipe")
        if not 0 <= hello.site < self._count or not 0 <= hello.rank < hello.ranks:
            return Refused(f"there are {self._count} sites, numbered from 0", "set another resilience.sites.site")
        return None

    def arrive(self, hello: SiteHello, connection: RankConnection) -> None:
        key = hello.site, hello.rank
        if before := self._ranks.get(key):
            before.abort()  # a restarted rank whose old connection is not known to be broken yet
        self._ranks[key] = connection
        if hello.site != self._site and hello.rank == 0:
            self._log(f"site {hello.site} is connected directly")

    def handle(self, hello: SiteHello, message: Message, payload: bytes) -> None:
        if not isinstance(message, Sent) or hello.site == self._site:
            raise ValueError(f"{type(message).__name__} is not a message for an inbox")
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
            self._log(f"site {hello.site} is no longer connected directly")


def make_inbox(plan: Plan, secret: bytes, log: TextIO) -> SiteInbox:
    resilience = plan.spec.resilience
    site = resilience.sites.site
    sites = resilience.sites.count
    assert site is not None, "a site's recipe contains its number"
    return SiteInbox(site, sites, secret, agreement_of(plan), resilience.heartbeat_timeout_s, log)
