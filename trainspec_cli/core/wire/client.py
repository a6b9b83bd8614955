"""A client of the rendezvous server: an authenticated connection that carries one JSON object per line, both ways."""

from __future__ import annotations

import contextlib
import json
import socket
import time

from trainspec_cli.core.json_value import JsonObject
from trainspec_cli.core.wire.handshake import HandshakeError, connect

RENDEZVOUS_PURPOSE = "rendezvous"
LINE_BYTES = 2**24
"""The longest line that either end accepts."""
RETRY_S = 0.05


class JsonClient:
    """A connection to the server. It is not thread-safe, except for one `send` during one `receive`.

    Raises OSError if the connection is lost or the server does not know the secret.
    """

    def __init__(self, address: str, secret: bytes, timeout_s: float):
        """Connect to `address` (host:port), retrying for `timeout_s` if the server does not listen yet."""
        self._connection = _connect(address, secret, time.monotonic() + timeout_s)
        self._unread = b""

    def ask(self, request: JsonObject, timeout_s: float) -> JsonObject:
        """Send a request and wait for its answer. Raises TimeoutError if none comes in time."""
        self.send(request)
        return self.receive(timeout_s)

    def send(self, request: JsonObject) -> None:
        self._connection.sendall(json.dumps(request, allow_nan=False).encode() + b"\n")

    def receive(self, timeout_s: float) -> JsonObject:
        self._connection.settimeout(timeout_s)
        while b"\n" not in self._unread:
            piece = self._connection.recv(2**16)
            if not piece:
                raise ConnectionResetError("the rendezvous server closed the connection")
            self._unread += piece
            if len(self._unread) > LINE_BYTES:
                raise ConnectionError("the rendezvous server sent a line without an end")
        # One read may hold the beginning of the next line.
        line, _, self._unread = self._unread.partition(b"\n")
        return dict(json.loads(line))

    def close(self) -> None:
        """Close the connection, which also wakes a thread that waits in `receive`."""
        with contextlib.suppress(OSError):  # the other end may have closed it
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def _connect(address: str, secret: bytes, deadline: float) -> socket.socket:
    host, _, port = address.rpartition(":")
    while True:
        try:
            return connect((host, int(port)), secret, RENDEZVOUS_PURPOSE)
        # A wrong secret stays wrong; trying again would only delay the error.
        except HandshakeError:
            raise
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(RETRY_S)
