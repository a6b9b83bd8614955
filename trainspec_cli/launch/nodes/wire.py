"""What agents and the hub say to one another: lines of words over TCP.

    agent -> hub   hello TOKEN NODE HOST | report JSON | ended EXIT_CODE | failed MESSAGE | beat
    hub -> agent   go | stop | end | beat

Of replica groups, whose starts are numbered from 1:

    hub -> agent   begin GROUP START HEAD PORT LIGHTHOUSE | drop GROUP START
    agent -> hub   lost GROUP START RANK MESSAGE | done GROUP START | dropped GROUP START

Nobody blocks: both look at their sockets while they do their own work, and a peer that is silent for too long is lost,
whether its process hangs, its host is off or its cable is cut (TCP by itself would wait for a quarter of an hour).
"""

from __future__ import annotations

import socket
import time

BEAT_INTERVAL_S = 1.0
PIECE_BYTES = 65536


class Wire:
    def __init__(self, connection: socket.socket, address: tuple[str, int] = ("", 0)):
        """`address`: the peer's, where it is known."""
        connection.setblocking(False)
        self.peer = address[0]
        self._connection, self._unread, self._unsent = connection, b"", b""
        self._heard_at = self._beat_at = time.monotonic()
        self.closed = False

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self._heard_at

    def say(self, line: str) -> None:
        self._unsent += line.encode() + b"\n"
        self._flush()

    def beat(self) -> None:
        """To be called often; says something once in `BEAT_INTERVAL_S`."""
        if time.monotonic() - self._beat_at >= BEAT_INTERVAL_S:
            self._beat_at = time.monotonic()
            self.say("beat")

    def hear(self) -> list[list[str]]:
        """The lines that have come, as words; beats are kept out."""
        while not self.closed:
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
