"""How this process's connections do: bytes, segments sent again and round-trip times, counted by the kernel.

Both ends of a connection know it by the same two addresses, so that a reader of all ranks' counts finds out between
which ranks it goes.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass

from trainspec_cli.engine.comm.wire_bytes import Connection, borrow, open_connections, read_tcp_info
from trainspec_cli.run.folder.event_types.observed import ConnectionCounts

TIMEOUTS_OFFSET = 240
"""`tcpi_total_rto` in `struct tcp_info`, since Linux 6.7."""
NEEDLESS_OFFSET = 216
"""`tcpi_dsack_dups`, since Linux 4.19: segments that had arrived when they were sent again; a process that had no
processor to acknowledge them lets them seem lost."""
FIELDS = struct.Struct("=68xI28xI52xI8xQ24xQQ")
"""Of `struct tcp_info`: round-trip time in us, segments sent again, data segments, busy time in us, bytes sent, bytes
sent again."""
COUNTED = 2**32
"""The kernel counts segments up to this, and then from 0."""
LISTED_EVERY = 16
"""Connections are looked for again after so many windows; most are opened at a run's start."""
REPORTED = 6
"""The connections that sent most are reported."""


@dataclass(frozen=True)
class ConnectionState:
    """A connection's counters since it was opened."""

    rtt_s: float
    resent: int
    segments: int
    sent_bytes: int
    busy_s: float
    timeouts: int


class ConnectionCounter:
    def __init__(self) -> None:
        self._cuts = 0
        self._ends: dict[Connection, tuple[str, str]] = {}
        self._before: dict[Connection, ConnectionState] = {}

    def cut(self) -> tuple[ConnectionCounts, ...]:
        """Return what was counted since the last call, of the connections that sent most."""
        if self._cuts % LISTED_EVERY == 0:
            self._find()
        self._cuts += 1
        counted = [counts for connection in list(self._ends) if (counts := self._count(connection)) is not None]
        return tuple(sorted(counted, key=lambda one: one.sent_bytes, reverse=True)[:REPORTED])

    def _find(self) -> None:
        connections = list(open_connections())
        self._ends = {one: self._ends.get(one) or ends_of(one[0]) for one in connections}
        self._before = {one: self._before[one] for one in connections if one in self._before}

    def _count(self, connection: Connection) -> ConnectionCounts | None:
        now, before = state_of(connection), self._before.get(connection)
        if now is None:
            return None
        self._before[connection] = now
        if before is None or now.sent_bytes <= before.sent_bytes:
            return None
        local, peer = self._ends[connection]
        return ConnectionCounts(
            local=local,
            peer=peer,
            sent_bytes=now.sent_bytes - before.sent_bytes,
            segments=(now.segments - before.segments) % COUNTED,
            resent=max(0, now.resent - before.resent),
            timeouts=max(0, now.timeouts - before.timeouts),
            busy_s=max(0.0, now.busy_s - before.busy_s),
            rtt_s=now.rtt_s,
        )


def ends_of(descriptor: int) -> tuple[str, str]:
    """Return the addresses of both ends; empty texts where it is closed."""
    with suppress(OSError), borrow(descriptor) as end:
        return _shown(end.getsockname()), _shown(end.getpeername())
    return "", ""


def _shown(address: tuple[object, ...]) -> str:
    """Return `10.0.0.1:29500`; an IPv4 address within IPv6 is shown as itself."""
    return f"{str(address[0]).removeprefix('::ffff:')}:{address[1]}"


def state_of(connection: Connection) -> ConnectionState | None:
    """Return a connection's counters; None where it is closed."""
    info = read_tcp_info(connection)
    if info is None:
        return None
    rtt_us, resent, segments, busy_us, sent, again = FIELDS.unpack_from(info)
    (timeouts,) = struct.unpack_from("=H", info, TIMEOUTS_OFFSET) if len(info) >= TIMEOUTS_OFFSET + 2 else (0,)
    (needless,) = struct.unpack_from("=I", info, NEEDLESS_OFFSET) if len(info) >= NEEDLESS_OFFSET + 4 else (0,)
    return ConnectionState(rtt_us / 1e6, resent - needless, segments, sent - again, busy_us / 1e6, timeouts)
