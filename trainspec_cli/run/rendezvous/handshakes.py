"""Limit the number and duration of the handshakes on a server's connections, and log rejected connections."""

from __future__ import annotations

import asyncio
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TextIO

from trainspec_cli.core.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge

MAX_UNPROVEN = 1024
"""Maximum number of simultaneous handshakes; starting another closes the oldest connection."""
LOGGED_REFUSALS = 20
"""Maximum number of rejected connections to log."""

BAD_REQUEST = (ValueError, KeyError, TypeError, ArithmeticError, RecursionError)


class Handshakes:
    def __init__(self, log: TextIO = sys.stderr) -> None:
        self._log = log
        self._unproven: dict[asyncio.Task[None], None] = {}
        self._refusals = 0
        self._max_unproven = min(MAX_UNPROVEN, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)

    @asynccontextmanager
    async def limited(self) -> AsyncIterator[None]:
        """Limit the duration of the handshake on this task's connection."""
        task = asyncio.current_task()
        assert task is not None, "each connection is served by an asyncio task"
        if len(self._unproven) >= self._max_unproven:
            oldest = next(iter(self._unproven))
            del self._unproven[oldest]
            oldest.cancel()
        self._unproven[task] = None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                yield
        finally:
            self._unproven.pop(task, None)

    def note_refusal(self, name: str, writer: asyncio.StreamWriter, error: BaseException) -> None:
        """Log why a connection to the server called `name` ended."""
        self._refusals += 1
        if self._refusals <= LOGGED_REFUSALS:
            peer = writer.get_extra_info("peername")
            print(
                f"{name}: the connection from {peer} ended: {type(error).__name__}: {error}", file=self._log, flush=True
            )


async def prove(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, challenge: Challenge) -> None:
    """Perform the server's half of the handshake. Raises HandshakeError, or EOFError if the connection ends."""
    writer.write(challenge.nonce)
    writer.write(challenge.accept(await reader.readexactly(ANSWER_BYTES)))
