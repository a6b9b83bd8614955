"""The connection between the supervisor's hub and the nodes' agents and workers.

Messages go over TCP, or over a Unix socket on the same node, after both ends have proved that they know the job's
secret. Neither end blocks: each polls its socket while doing its own work.

Hub and agents send heartbeats. A peer that is silent for too long is considered lost: its process hangs, its node is
down, or its cable is cut (TCP alone would take a quarter of an hour to notice). Workers send no heartbeats, because the
agent or supervisor that started them sees when they exit."""

from __future__ import annotations

import errno
import socket
import time

from trainspec_cli.core.errors import RecipeError
from trainspec_cli.core.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge, HandshakeError, connect
from trainspec_cli.recipe.keys.run import RunSection
from trainspec_cli.run.channel.messages import Beat, Message, decode, encode

PURPOSE = "hub"
BEAT_INTERVAL_S = 1.0
PIECE_BYTES = 65536
UNREACHABLE_SHARE = 1 / 8
UNREACHABLE_S = 2.0
"""A system acknowledges heartbeats even if its processes hang. If it does not within this share of
`run.node_timeout_s`, but at least this many seconds, it is off, or a network link is down (TCP_USER_TIMEOUT, RFC 5482;
only on Linux)."""
RETRY_S = 0.2
CALL_TIMEOUT_S = 60.0
"""An agent retries for this many seconds after the hub has closed its connection. (The hub does so when too many agents
connect at the same time.)"""
LINE_BYTES = 2**22
"""A peer is disconnected if it sends a line longer than this or leaves this many bytes unread."""
SHOWN_BYTES = 80
"""Number of bytes of an invalid line that the error message shows."""


def call_hub(address: tuple[str, int] | str, secret: bytes, timeout_s: float = RunSection.node_timeout_s) -> Wire:
    """Connect to a host and port, or to the path of a Unix socket. `timeout_s`: how long the hub may be silent. Raises
    OSError if the hub cannot be reached or does not know the secret."""
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            return Wire(connect(address, secret, PURPOSE), timeout_s)
        except ConnectionResetError:  # too many peers are connecting at the same time
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class PendingPeer:
    """A connection to the hub whose handshake is not complete yet."""

    def __init__(self, connection: socket.socket, secret: bytes, timeout_s: float = RunSection.node_timeout_s):
        """`timeout_s`: how long the peer may be silent. Raises OSError if it has already closed the connection."""
        connection.setblocking(False)
        self._timeout_s = timeout_s
        self._connection, self._challenge = connection, Challenge(secret, PURPOSE)
        self._answer, self._deadline = b"", time.monotonic() + TIMEOUT_S
        connection.send(self._challenge.nonce)  # this does not block, because 32 bytes fit into an empty send buffer

    def advance(self) -> Wire | None:
        """Return the wire once the peer has proved that it knows the secret; None until then. Raises OSError after a
        wrong proof, a closed connection or a timeout."""
        if time.monotonic() > self._deadline:
            raise HandshakeError("the connection did not authenticate in time")
        try:
            piece = self._connection.recv(ANSWER_BYTES - len(self._answer))
        except BlockingIOError:
            return None
        if not piece:
            raise HandshakeError("the connection was closed")
        self._answer += piece
        if len(self._answer) < ANSWER_BYTES:
            return None
        self._connection.send(self._challenge.accept(self._answer))
        return Wire(self._connection, self._timeout_s)

    def close(self) -> None:
        self._connection.close()


class Wire:
    def __init__(self, connection: socket.socket, timeout_s: float = RunSection.node_timeout_s):
        """`timeout_s`: how long the peer may be silent (`run.node_timeout_s`)."""
        connection.setblocking(False)
        self.unreachable_s = max(UNREACHABLE_S, UNREACHABLE_SHARE * timeout_s)
        if connection.family != socket.AF_UNIX and hasattr(socket, "TCP_USER_TIMEOUT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(self.unreachable_s * 1000))
        self._connection = connection
        self._unread = b""
        self._unsent = b""
        self._received_at = self._beat_at = time.monotonic()
        self.closed = False
        self.is_unreachable = False
        """True if the connection was closed because the peer's system acknowledged nothing for `unreachable_s`."""
        self.was_heard = False
        """True once the peer has sent something."""
        self.fault = ""
        """Why this end closed the connection because of an invalid message from the peer."""

    def fileno(self) -> int:
        return self._connection.fileno()

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._received_at

    def send(self, message: Message) -> None:
        self._unsent += encode(message)
        self.flush()
        if len(self._unsent) > LINE_BYTES:
            self.close()

    def beat(self) -> None:
        """Send a heartbeat if none has been sent for `BEAT_INTERVAL_S`. Call this often."""
        if time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            self._beat_at = time.monotonic()
            self.send(Beat())

    def receive(self) -> list[Message]:
        """Return the received messages, excluding heartbeats, at most `LINE_BYTES` at a time. A peer that sends an
        invalid message is disconnected."""
        self._read()
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LINE_BYTES:
            self.close()
        received: list[Message] = []
        for line in lines:
            try:
                received.append(decode(line))
            except (ValueError, RecipeError):
                self.fault = f"sent an invalid message: {line[:SHOWN_BYTES].decode(errors='replace')!r}"
                self.close()
                break
        return [message for message in received if not isinstance(message, Beat)]

    def _read(self) -> None:
        while not self.closed and len(self._unread) <= LINE_BYTES:
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                piece = b""
                self._note(error)
            self.closed = not piece
            if piece:
                self._received_at = time.monotonic()
                self.was_heard = True
                self._unread += piece

    def close(self) -> None:
        self.closed = True
        self._connection.close()

    def flush(self) -> None:
        """Send the data that did not fit into the socket's buffer earlier."""
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError as error:
            self._note(error)
            self.closed = True

    def _note(self, error: OSError) -> None:
        self.is_unreachable = error.errno in (errno.ETIMEDOUT, errno.EHOSTUNREACH)
