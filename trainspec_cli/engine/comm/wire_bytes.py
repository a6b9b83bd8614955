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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from trainspec_cli.core.environment_names import RENDEZVOUS

NOT_SENT_OFFSET, SENT_OFFSET, RETRANSMITTED_OFFSET, INFO_BYTES = 144, 200, 208, 216
"""Offsets in `struct tcp_info`; all three since Linux 4.19."""
LARGEST_INFO_BYTES = 512
ESTABLISHED = 1
"""The first byte of `struct tcp_info`, the state (`TCP_ESTABLISHED`, net/tcp_states.h)."""
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
    _reserved: dict[Connection, str] = field(default_factory=dict)
    """Connections whose bytes have a purpose, whatever goes on meanwhile."""

    def find_connections(self) -> None:
        """Look for connections that are new, or gone; what the new ones have written so far is `other`."""
        self._count(OTHER)
        self._written = {connection: self._written.get(connection, 0) for connection in open_connections()}
        self._count(OTHER)

    @contextmanager
    def purpose(self, name: str) -> Iterator[None]:
        """Count what is written inside as `name`."""
        self._count(OTHER)
        try:
            yield
        finally:
            self._count(name)

    def reserve(self, connections: Iterable[Connection], purpose: str) -> None:
        """Count what is written to `connections` as `purpose` until `release`, beside all that others carry."""
        self._count(OTHER)
        self._reserved |= dict.fromkeys(connections, purpose)

    def release(self, connections: Iterable[Connection]) -> None:
        self._count(OTHER)
        for connection in connections:
            self._reserved.pop(connection, None)

    def totals(self) -> dict[str, int]:
        self._count(OTHER)
        return dict(self.counted)

    def _count(self, name: str) -> None:
        for connection, before in self._written.items():
            written = _written_bytes(connection)
            if written is not None and written >= before:
                self.counted[self._reserved.get(connection, name)] += written - before
                self._written[connection] = written


def open_connections() -> Iterator[Connection]:
    """Yield the process's TCP connections, but for those to the rendezvous server, which carry no collectives."""
    server = os.environ.get(RENDEZVOUS, "").rpartition(":")[2]
    with suppress(OSError):  # of a process without a descriptor to spare, say
        for entry in list(Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else ():
            with suppress(OSError):  # closed meanwhile, or no socket
                if _peer_port(int(entry.name)) != server:
                    yield int(entry.name), entry.stat().st_ino


def end_connections() -> None:
    """Shut the process's connections to its peers: whoever waits at one of them, here or there, gets an error."""
    for descriptor, _ in open_connections():
        with suppress(OSError), borrow(descriptor) as end:  # closed meanwhile
            end.shutdown(socket.SHUT_RDWR)


def _peer_port(descriptor: int) -> str:
    """Return the port at the other end of a TCP connection. Raises OSError for any other descriptor."""
    with borrow(descriptor) as end:
        end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return str(end.getpeername()[1])


@contextmanager
def borrow(descriptor: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor, which stays open after it. Raises OSError where it is no socket."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _written_bytes(connection: Connection) -> int | None:
    """Return what was written to a TCP connection since it was opened; None where it is closed."""
    info = read_tcp_info(connection)
    if info is None:
        return None
    (waiting,) = struct.unpack_from("=I", info, NOT_SENT_OFFSET)
    sent, again = struct.unpack_from("=QQ", info, SENT_OFFSET)
    return int(sent - again + waiting)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def is_established(connection: Connection) -> bool:
    """Return False once either end has closed the connection."""
    info = read_tcp_info(connection)
    return info is not None and info[0] == ESTABLISHED


def read_tcp_info(connection: Connection) -> bytes | None:
    """Return the kernel's `struct tcp_info` of a connection, as long as this kernel makes it; None where it is closed,
    even if another one has its descriptor by now, or the kernel older than 4.19."""
    descriptor, inode = connection
    info = ctypes.create_string_buffer(LARGEST_INFO_BYTES)
    size = ctypes.c_uint(LARGEST_INFO_BYTES)
    failed = _libc().getsockopt(descriptor, socket.IPPROTO_TCP, socket.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < INFO_BYTES:
        return None
    with suppress(OSError):  # closed meanwhile
        return info.raw[: size.value] if os.fstat(descriptor).st_ino == inode else None
    return None
