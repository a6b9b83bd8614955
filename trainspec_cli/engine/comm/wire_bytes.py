"""Bytes that this process has written to its peers, counted by the kernel at the process's own TCP sockets.

gloo carries every collective of a CPU run over TCP, also between ranks of one node. For each connection the kernel
counts the bytes sent, those sent again, and those that still wait in its buffer (`TCP_INFO`, linux/tcp.h): the first
less the second, plus the third, is what was written to it, without the headers of TCP and IP. NCCL's traffic goes by
other ways, so that nothing is counted of a run on GPUs.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainspec_cli.environment_names import RENDEZVOUS

NOT_SENT_OFFSET, SENT_OFFSET, RETRANSMITTED_OFFSET, INFO_BYTES = 144, 200, 208, 216
"""In `struct tcp_info`; all three since Linux 4.19."""
OTHER = "other"
Connection = tuple[int, int]
"""A descriptor and its inode, which together tell a connection from a later one."""


@dataclass
class WireMeter:
    """Divides what is written by purpose; `other` is all that no purpose claims.

    Connections are asked by their descriptors and never held: a peer must notice when gloo lets go of one.
    """

    counted: Counter[str] = field(default_factory=Counter)
    _written: dict[Connection, int] = field(default_factory=dict)

    def find_connections(self) -> None:
        """Look for connections that are new, or gone; what the new ones have written so far is `other`."""
        self._count(OTHER)
        self._written = {connection: self._written.get(connection, 0) for connection in _open_connections()}
        self._count(OTHER)

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Count what is written inside as `name`."""
        self._count(OTHER)
        try:
            yield
        finally:
            self._count(name)

    def totals(self) -> dict[str, int]:
        self._count(OTHER)
        return dict(self.counted)

    def _count(self, name: str) -> None:
        for connection, before in self._written.items():
            written = _written_bytes(connection[0])
            if written is not None and written >= before:
                self.counted[name] += written - before
                self._written[connection] = written


def _open_connections() -> Iterator[Connection]:
    """Yield the process's TCP connections, but for those to the rendezvous server, which carry no collectives."""
    server = os.environ.get(RENDEZVOUS, "").rpartition(":")[2]
    with suppress(OSError):  # of a process without a descriptor to spare, say
        for entry in list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else ():
            with suppress(OSError):  # closed meanwhile, or no socket
                if _peer_port(int(entry.name)) != server:
                    yield int(entry.name), entry.stat().st_ino


def _peer_port(descriptor: int) -> str:
    """Return the port at the other end of a TCP connection. Raises OSError for any other descriptor."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        borrowed.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return str(borrowed.getpeername()[1])
    finally:
        borrowed.detach()


def _written_bytes(descriptor: int) -> int | None:
    """Return what was written to a TCP connection since it was opened; None where it is closed."""
    info = ctypes.create_string_buffer(INFO_BYTES)
    size = ctypes.c_uint(INFO_BYTES)
    failed = ctypes.CDLL(None).getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < INFO_BYTES:
        return None
    (waiting,) = struct.unpack_from("=I", info, NOT_SENT_OFFSET)
    sent, again = struct.unpack_from("=QQ", info, SENT_OFFSET)
    return int(sent - again + waiting)
