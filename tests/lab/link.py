"""A thin link between sites: a relay to a port of this machine that counts, delays and cuts what passes."""

from __future__ import annotations

import asyncio
import threading
import time

from lab.ports import free_port

PIECE_BYTES = 16_384


class Link:
    """It listens at `port`. `carried_bytes` counts both ways, as read from sockets (TLS and all)."""

    def __init__(self, to_port: int, bytes_per_s: float | None = None, delay_s: float = 0.0):
        self.port, self.carried_bytes = free_port(), 0
        self.cut_at_bytes: int | None = None
        """Once this many bytes have gone to the port, the connection that carries them ends."""
        self.cuts_all = False
        """Then all others end too."""
        self.cuts = 0
        self._gone_bytes = 0
        self._to_port, self._bytes_per_s, self._delay_s = to_port, bytes_per_s, delay_s
        self._open: set[asyncio.StreamWriter] = set()
        self._listens = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        self._listens.wait()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._join, "127.0.0.1", self.port)
        self._listens.set()
        await server.serve_forever()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.close()
            return
        both = {writer, far_writer}
        self._open |= both
        await asyncio.gather(
            self._carry(reader, far_writer, both), self._carry(far_reader, writer, None), return_exceptions=True
        )
        self._open -= both

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cuttable: set[asyncio.StreamWriter] | None
    ) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        late = asyncio.ensure_future(self._deliver(waiting, writer))
        free_s = time.monotonic()
        while content := await reader.read(PIECE_BYTES):
            self.carried_bytes += len(content)
            self._gone_bytes += len(content) if cuttable else 0
            if cuttable and self.cut_at_bytes is not None and self._gone_bytes >= self.cut_at_bytes:
                self._cut(self._open if self.cuts_all else cuttable)
                break
            if self._bytes_per_s:
                free_s = max(free_s, time.monotonic()) + len(content) / self._bytes_per_s
                await asyncio.sleep(max(0.0, free_s - time.monotonic()))
            waiting.put_nowait((time.monotonic() + self._delay_s, content))
        waiting.put_nowait((time.monotonic() + self._delay_s, b""))
        await late

    async def _deliver(self, waiting: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due_s, content = await waiting.get()
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            if not content:
                writer.close()
                return
            writer.write(content)
            await writer.drain()

    def _cut(self, ended: set[asyncio.StreamWriter]) -> None:
        self.cut_at_bytes, self.cuts = None, self.cuts + 1
        for writer in ended:
            writer.transport.abort()
