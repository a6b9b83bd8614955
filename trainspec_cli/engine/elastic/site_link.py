"""A rank's connection to the sites' meeting point: encrypted, authenticated, and beside the training.

A thread of its own sends what it is given and keeps what arrives; where the connection breaks it connects anew, and
sends again what was not decided yet. Nothing here waits for the network on the training's own thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

from trainspec_cli.errors import TrainspecError
from trainspec_cli.json_value import JsonObject
from trainspec_cli.policy.sites.round import RoundRecord
from trainspec_cli.spec.canonical import from_plain
from trainspec_cli.spec.records import read_record
from trainspec_cli.wire.handshake import NONCE_BYTES, PROOF_BYTES, TIMEOUT_S, Answer, HandshakeError
from trainspec_cli.wire.sites import (
    GREETING,
    LINE_BYTES,
    OPERATION,
    OPERATIONS,
    Alive,
    Decided,
    Followed,
    Message,
    Refused,
    Sent,
    SiteHello,
    Welcome,
    pack,
    receive,
)
from trainspec_cli.wire.tls import client_context, peer_digest, purpose_of

BEAT_S = 1.0
RETRY_S = 0.5
LOST = (OSError, EOFError, ValueError, TimeoutError, TrainspecError)
"""What a connection ends with."""


class SiteLink:
    def __init__(self, endpoint: str, secret: bytes, hello: SiteHello, applied: Callable[[], int], silence_s: float):
        """`applied` returns the newest round that was applied, which a new connection begins from."""
        self._address = endpoint.rpartition(":")[::2]
        self._secret, self._hello, self._applied, self._silence_s = secret, hello, applied, silence_s
        self.is_member: bool | None = None
        """None: the meeting point has not answered yet."""
        self.record: RoundRecord | None = None
        """That of the round which was applied when the connection began."""
        self.refusal: Refused | None = None
        self.trouble = ""
        """Why there is no connection; empty while there is one."""
        self.sent_bytes = self.received_bytes = 0
        """Of messages, before encryption."""
        self._decided: dict[int, tuple[RoundRecord, dict[int, bytes]]] = {}
        self._pending: tuple[int, bytes] | None = None
        self._followed: int | None = None
        self._posted_s: float | None = None
        self._exchange_s = 0.0
        self._outbox: asyncio.Queue[bytes] | None = None
        self._loop = asyncio.new_event_loop()
        self._heard_s = 0.0
        self._task = self._loop.create_task(self._stay_connected())
        self._thread = threading.Thread(target=self._run, name="sites", daemon=True)
        self._thread.start()

    # Called by the training

    def send(self, message: Sent, payload: bytes) -> None:
        """Send an outer gradient, now and after each new connection, until its round is decided."""
        self._pending = message.round, pack(message, payload)
        self._call(self._post_pending)

    def follow(self, number: int) -> None:
        """Say that all rounds up to `number` were applied, by a site that is no member."""
        self._followed = number
        self._call(self._post_followed)

    def joined(self) -> None:
        """This site is a member from now on."""
        self.is_member, self._followed = True, None

    def has(self, number: int) -> bool:
        return number in self._decided

    def take(self, number: int) -> tuple[RoundRecord, dict[int, bytes]]:
        """Return a round that has arrived, and the outer gradients by site; those before it are forgotten."""
        found = self._decided[number]
        for older in [one for one in list(self._decided) if one <= number]:
            del self._decided[older]
        if self._pending and self._pending[0] <= number:
            self._pending = None
        return found

    def cut_exchange_s(self) -> float:
        """Return how long the newest exchange took, from when its outer gradient was sent until its round had arrived;
        0 where the connection broke meanwhile, or none was made since the last call."""
        taken_s, self._exchange_s = self._exchange_s, 0.0
        return taken_s

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
        while self.refusal is None:
            try:
                await self._connect()
            except LOST as error:
                self.trouble = str(error) or type(error).__name__
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Connect, and serve the connection until it breaks."""
        host, port = self._address
        async with asyncio.timeout(TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, int(port), limit=LINE_BYTES)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._prove(reader, writer)
            outbox = self._outbox = asyncio.Queue()
            outbox.put_nowait(pack(replace(self._hello, applied=self._applied())))
            await self._serve(reader, writer, outbox)
        finally:
            self._outbox = None
            writer.transport.abort()

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]
    ) -> None:
        """Write and read until either fails, or nothing was heard for too long."""
        self._heard_s = self._loop.time()
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
            raise HandshakeError("what listens there is no meeting point of this version")
        await writer.start_tls(client_context())
        digest = peer_digest(writer.get_extra_info("ssl_object"))
        answer = Answer(self._secret, purpose_of(digest), await reader.readexactly(NONCE_BYTES))
        writer.write(answer.content)
        try:
            answer.check(await reader.readexactly(PROOF_BYTES))
        except EOFError as error:
            raise HandshakeError("the meeting point knows another secret, or was full") from error

    async def _write(self, writer: asyncio.StreamWriter, outbox: asyncio.Queue[bytes]) -> None:
        while True:
            try:
                async with asyncio.timeout(BEAT_S):
                    message = await outbox.get()
            except TimeoutError:
                message = pack(Alive())
            self.sent_bytes += len(message)
            writer.write(message)
            await writer.drain()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            self._hear(*await receive(reader, self._note_heard))

    def _note_heard(self) -> None:
        self._heard_s = self._loop.time()

    async def _watch_silence(self) -> None:
        while self._loop.time() < self._heard_s + self._silence_s:
            await asyncio.sleep(BEAT_S)
        raise TimeoutError(f"the meeting point was silent for {self._silence_s:g} s")

    def _hear(self, fields: JsonObject, payload: bytes) -> None:
        """Raise ValueError where a message does not fit."""
        kind: type[Message] = OPERATIONS[str(fields[OPERATION])]
        message = read_record(kind, fields)
        self.received_bytes += len(payload)
        if isinstance(message, Welcome):
            self.record = from_plain(RoundRecord, message.record) if message.record else None
            self.is_member, self.trouble = message.is_member, ""
            self._post_pending()
            self._post_followed()
            self._posted_s = None  # sent once more
        elif isinstance(message, Decided):
            record = from_plain(RoundRecord, message.record)
            if self._posted_s is not None and self._pending and self._pending[0] == record.round:
                self._exchange_s = self._loop.time() - self._posted_s
            self._decided[record.round] = record, _cut(payload, message)
        elif isinstance(message, Refused):
            self.refusal = message

    def _post_pending(self) -> None:
        """Send what waits for its round, where the meeting point has answered."""
        if self._outbox is not None and self._pending and self.is_member and not self.trouble:
            self._outbox.put_nowait(self._pending[1])
            self._posted_s = self._loop.time()

    def _post_followed(self) -> None:
        if self._outbox is not None and self._followed is not None and not self.trouble:
            self._outbox.put_nowait(pack(Followed(self._followed)))


def _cut(payload: bytes, message: Decided) -> dict[int, bytes]:
    """Return the outer gradients by site. Raises ValueError where the sizes do not fit."""
    if sum(message.sizes) != len(payload) or len(message.sites) != len(message.sizes):
        raise ValueError("the sizes of outer gradients do not fit")
    cut, start = {}, 0
    for site, size in zip(message.sites, message.sizes, strict=True):
        cut[site] = payload[start : start + size]
        start += size
    return cut
