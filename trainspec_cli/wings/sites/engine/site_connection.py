"""A rank's connection to a server of far-apart sites, the meeting point or an inbox: encrypted, and authenticated.

Where it breaks it is made anew. All runs in one thread's event loop, beside the training.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.wire.handshake import NONCE_BYTES, PROOF_BYTES, TIMEOUT_S, Answer, HandshakeError
from trainspec_cli.recipe.records import read_record
from trainspec_cli.wings.sites.wire import (
    GREETING,
    LINE_BYTES,
    Alive,
    Message,
    Refused,
    SiteHello,
    client_context,
    pack,
    peer_digest,
    purpose_of,
    receive,
)

BEAT_S = 1.0
RETRY_S = 0.5
LOST = (OSError, EOFError, ValueError, TimeoutError, TrainspecError)
"""What a connection ends with."""


@dataclass(frozen=True)
class SiteAccess:
    """What a rank shows to every server."""

    secret: bytes
    hello: Callable[[], SiteHello]
    silence_s: float
    """A server that was silent for so long is lost."""


class SiteConnection:
    def __init__(self, server: str, address: str, access: SiteAccess, hear: Callable[[Message, bytes], None]):
        """`server` is the name that both ends prove; `hear` is called with what the server says."""
        self.server = server
        self.address = address
        self._access = access
        self._hear = hear
        self.lost: Callable[[], None] = lambda: None
        """Called whenever the connection could not be made, or has ended."""
        self.refusal: Refused | None = None
        self.trouble = ""
        """Why there was no connection at the last attempt, or why it ended."""
        self.sent_bytes = self.received_bytes = 0
        """Of messages, before encryption; received ones without their lines."""
        self._outbox: asyncio.Queue[bytes] | None = None
        self._unwritten = 0
        """Messages that were posted and are not on their way yet."""
        self._heard_s = 0.0

    @property
    def is_open(self) -> bool:
        """Both ends have proved who they are."""
        return self._outbox is not None

    @property
    def is_behind(self) -> bool:
        """Return whether something that was posted is not on its way yet."""
        return self.is_open and self._unwritten > 0

    def post(self, content: bytes) -> None:
        """Send a packed message, where the connection is open."""
        if self._outbox is not None:
            self._outbox.put_nowait(content)
            self._unwritten += 1

    async def stay_connected(self) -> None:
        while self.refusal is None:
            try:
                await self._connect()
            except LOST as error:
                self.trouble = self.refusal.reason if self.refusal else str(error) or type(error).__name__
            self.lost()
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Connect, and serve the connection until it breaks."""
        host, _, port = self.address.rpartition(":")
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._prove(reader, writer)
            writer.write(pack(self._access.hello()))
            outbox = self._outbox = asyncio.Queue()
            self._unwritten = 0
            await self._serve(reader, writer, outbox)
        finally:
            self._outbox = None
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]
    ) -> None:
        """Write and read until either fails, or nothing was heard for too long."""
        self._note_heard()
        serving = (self._write(writer, outbox), self._read(reader), self._watch_silence())
        tasks = [asyncio.ensure_future(one) for one in serving]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readexactly(len(GREETING)) != GREETING:
            raise HandshakeError("what listens there is no server of sites of this version")
        await writer.start_tls(client_context())
        digest = peer_digest(writer.get_extra_info("ssl_object"))
        purpose = purpose_of(self.server, digest)
        answer = Answer(self._access.secret, purpose, await reader.readexactly(NONCE_BYTES))
        writer.write(answer.content)
        try:
            answer.check(await reader.readexactly(PROOF_BYTES))
        except EOFError as error:
            raise HandshakeError("what listens there knows another secret, is another site's, or was full") from error

    async def _write(self, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]) -> None:
        while True:
            posted = True
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await outbox.get()
            except TimeoutError:
                message = pack(Alive())
                posted = False
            self.sent_bytes += len(message)
            writer.write(message)
            await writer.drain()
            self._unwritten -= posted

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            kind, fields, payload = await receive(reader, self._note_heard)
            message = read_record(kind, fields)
            self.received_bytes += len(payload)
            if isinstance(message, Refused):
                self.refusal = message
            elif not isinstance(message, Alive):
                self._hear(message, payload)

    def _note_heard(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()

    async def _watch_silence(self) -> None:
        while asyncio.get_running_loop().time() < self._heard_s + self._access.silence_s:
            await asyncio.sleep(BEAT_S)
        raise TimeoutError(f"it was silent for {self._access.silence_s:g} s")
