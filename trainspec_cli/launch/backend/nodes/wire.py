"""What agents and the hub say to one another: lines of words over TCP, once both have shown that they know the secret.

    agent -> hub   hello NODE HOST | report JSON | ended EXIT_CODE | failed MESSAGE | beat
    hub -> agent   go | stop | end | beat

Of replica groups, whose starts are numbered from 1:

    hub -> agent   begin GROUP START | drop GROUP START
    agent -> hub   lost GROUP START RANK MESSAGE | done GROUP START | dropped GROUP START

Nobody blocks: both look at their sockets while they do their own work, and a peer that is silent for too long is lost,
whether its process hangs, its host is off or its cable is cut (TCP by itself would wait for a quarter of an hour).
"""

from __future__ import annotations

import socket
import time

from trainspec_cli.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge, HandshakeError, connect

PURPOSE = "hub"
BEAT_INTERVAL_S = 1.0
PIECE_BYTES = 65536
RETRY_S = 0.2
CALL_TIMEOUT_S = 60.0
"""So long an agent calls again that the hub has sent away, as it does when too many knock at once."""
LINE_BYTES = 2**22
"""A peer that says a longer line, or leaves as much unread, is cut off."""


def call_hub(address: tuple[str, int], secret: bytes) -> Wire:
    """Raises OSError where the hub is not reached, or does not know the secret."""
    deadline = time.monotonic() + CALL_TIMEOUT_S
    while True:
        try:
            return Wire(connect(address, secret, PURPOSE))
        except ConnectionResetError:  # too many knock at once
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)


class Knock:
    """A connection to the hub that has proved nothing yet."""

    def __init__(self, connection: socket.socket, secret: bytes):
        """Raises OSError where the other end has gone already."""
        connection.setblocking(False)
        self._connection, self._challenge = connection, Challenge(secret, PURPOSE)
        self._answer, self._deadline = b"", time.monotonic() + TIMEOUT_S
        connection.send(self._challenge.nonce)  # an empty buffer takes 32 bytes

    def advance(self) -> Wire | None:
        """Return the wire once the other end has proved itself; None until then.

        Raises OSError where it never will: a wrong proof, a closed connection, too long a silence.
        """
        if time.monotonic() > self._deadline:
            raise HandshakeError("the connection has proved nothing in time")
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
        return Wire(self._connection)

    def close(self) -> None:
        self._connection.close()


class Wire:
    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._connection, self._unread, self._unsent = connection, b"", b""
        self._heard_at = self._beat_at = time.monotonic()
        self.closed = False

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def say(self, line: str) -> None:
        self._unsent += line.encode() + b"\n"
        self._flush()
        if len(self._unsent) > LINE_BYTES:
            self.close()

    def beat(self) -> None:
        """To be called often; says something once in `BEAT_INTERVAL_S`."""
        if time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            self._beat_at = time.monotonic()
            self.say("beat")

    def hear(self) -> list[list[str]]:
        """Return the lines that have come, as words, without beats; at most `LINE_BYTES` at once."""
        while not self.closed and len(self._unread) <= LINE_BYTES:
            try:
                piece = self._connection.recv(PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            self.closed = not piece
            if piece:
                self._heard_at = time.monotonic()
                self._unread += piece
        *lines, self._unread = self._unread.split(b"\n")
        if len(self._unread) > LINE_BYTES:
            self.close()
        said = [line.decode(errors="replace").split() for line in lines]
        return [words for words in said if words and words != ["beat"]]

    def close(self) -> None:
        self.closed = True
        self._connection.close()

    def _flush(self) -> None:
        try:
            while self._unsent and not self.closed:
                self._unsent = self._unsent[self._connection.send(self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
