"""A server of ranks of far-apart sites, in a thread of its own: the meeting point's, and that of a site's inbox.

It hears who proves, inside of TLS, that it knows the sites' secret and whom it means, and hands on what they say.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Protocol, TextIO

from trainspec_cli.core.errors import TrainspecError
from trainspec_cli.core.wire.handshake import Challenge
from trainspec_cli.core.wire.sites import (
    GREETING,
    LINE_BYTES,
    Alive,
    Message,
    Refused,
    SiteHello,
    receive,
)
from trainspec_cli.core.wire.tls import make_certificate
from trainspec_cli.recipe.records import read_record
from trainspec_cli.run.rendezvous.door import BAD_REQUEST, Door, prove
from trainspec_cli.wings.sites.connections import RankConnection

TICK_S = 0.05
ENDS = (*BAD_REQUEST, OSError, EOFError, TrainspecError, asyncio.CancelledError)


class Served(Protocol):
    """What is behind a server. All is called in the server's thread."""

    def refusal(self, hello: SiteHello) -> Refused | None: ...

    def arrive(self, hello: SiteHello, connection: RankConnection) -> None: ...

    def hear(self, hello: SiteHello, message: Message, payload: bytes) -> None:
        """Hear a message. Raises one of `BAD_REQUEST`, or OSError, where it does not fit: the connection ends."""

    def leave(self, hello: SiteHello, connection: RankConnection) -> None: ...

    def turn(self) -> None:
        """Do what is due. Called again and again."""

    def lingers(self, closed_for_s: float) -> bool:
        """Return whether to go on although the server was asked to end so long ago."""

    def abort(self) -> None:
        """End all connections."""


class SiteServer:
    def __init__(self, name: str, served: Served, secret: bytes, log: TextIO):
        """`name` is what the proofs of both ends say of it."""
        self._name, self._served, self._secret, self._log = name, served, secret, log
        self._certificate = make_certificate()
        self._door = Door(log)
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

    def say(self, text: str) -> None:
        print(f"sites: {text}", file=self._log, flush=True)

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._serve_connection, sock=listener, limit=LINE_BYTES)
        closing_s: float | None = None
        while closing_s is None or self._served.lingers(self._loop.time() - closing_s):
            self._served.turn()
            await asyncio.sleep(TICK_S)
            if self._closing.is_set() and closing_s is None:
                closing_s = self._loop.time()
        server.close()
        self._served.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection. An error is logged and ends this connection alone."""
        connection = RankConnection(writer)
        hello: SiteHello | None = None
        try:
            async with self._door.proving():
                writer.write(GREETING)
                await writer.start_tls(self._certificate.context)
                await prove(reader, writer, Challenge(self._secret, self._certificate.purpose(self._name)))
                hello = await self._greet(reader, connection)
            if hello is not None:
                await self._serve_rank(reader, connection, hello)
        except ENDS as error:
            self._door.note_refusal("sites", writer, error)
        finally:
            if hello is not None:
                self._served.leave(hello, connection)
            writer.transport.abort()

    async def _greet(self, reader: asyncio.StreamReader, connection: RankConnection) -> SiteHello | None:
        """Return what the rank says of itself; None where it was refused."""
        message, _ = await _receive(reader, connection)
        if not isinstance(message, SiteHello):
            raise ValueError("a rank begins with hello")
        if refusal := self._served.refusal(message):
            self.say(f"site {message.site} is refused: {refusal.reason}")
            connection.send(refusal)
            await connection.flush()
            return None
        return message

    async def _serve_rank(self, reader: asyncio.StreamReader, connection: RankConnection, hello: SiteHello) -> None:
        self._served.arrive(hello, connection)
        writing = asyncio.ensure_future(connection.write())
        try:
            while True:
                message, payload = await _receive(reader, connection)
                if not isinstance(message, Alive):
                    self._served.hear(hello, message, payload)
        finally:
            writing.cancel()


async def _receive(reader: asyncio.StreamReader, connection: RankConnection) -> tuple[Message, bytes]:
    kind, fields, payload = await receive(reader, connection.hear)
    return read_record(kind, fields), payload
