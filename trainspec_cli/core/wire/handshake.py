"""The handshake: both ends prove that they know the job's secret before either processes any other data from its peer.

    server -> client   a fresh nonce of 32 bytes
    client -> server   its own nonce of 32 bytes, and HMAC-SHA256(secret, "client" + purpose + both nonces)
    server -> client   HMAC-SHA256(secret, "server" + purpose + both nonces)

The lengths are fixed, so an unauthenticated peer can make the other end buffer at most 64 bytes. Fresh nonces make
recorded handshakes useless, and the purpose prevents the reuse of a proof with a different server. The handshake only
authenticates: later bytes are neither encrypted nor signed (docs/security.md).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from dataclasses import dataclass, field

NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
TIMEOUT_S = 10.0
"""Time limit for a handshake, after which the connection is closed."""


class HandshakeError(ConnectionError):
    """The other end does not know the secret."""


@dataclass(frozen=True)
class Challenge:
    """The server's half of one handshake."""

    secret: bytes
    purpose: str
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    def accept(self, answer: bytes) -> bytes:
        """Return the server's proof for the client's answer. Raises HandshakeError for a wrong answer."""
        theirs = answer[:NONCE_BYTES]
        proof = answer[NONCE_BYTES:]
        # The duration of `==`, which stops at the first wrong byte, would reveal how much of a guessed proof is right.
        if not hmac.compare_digest(proof, _prove(self.secret, "client", self.purpose, self.nonce, theirs)):
            raise HandshakeError("the client does not know the job's secret")
        return _prove(self.secret, "server", self.purpose, self.nonce, theirs)


@dataclass(frozen=True)
class Answer:
    """The client's half of one handshake."""

    secret: bytes
    purpose: str
    theirs: bytes
    """The server's nonce."""
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))

    @property
    def content(self) -> bytes:
        """Return the client's message: its nonce and its proof."""
        return self.nonce + _prove(self.secret, "client", self.purpose, self.theirs, self.nonce)

    def check(self, proof: bytes) -> None:
        """Raise HandshakeError if the server's proof is wrong."""
        if not hmac.compare_digest(proof, _prove(self.secret, "server", self.purpose, self.theirs, self.nonce)):
            raise HandshakeError("the server does not know the job's secret")


def connect(address: tuple[str, int] | str, secret: bytes, purpose: str) -> socket.socket:
    """Return an authenticated connection to a port of a host, or to the path of a Unix socket. Raises the same errors
    as `prove_to`."""
    if isinstance(address, str):
        connection = socket.socket(socket.AF_UNIX)
    else:
        connection = socket.create_connection(address, TIMEOUT_S)
    try:
        if isinstance(address, str):
            connection.settimeout(TIMEOUT_S)
            connection.connect(address)
        else:
            # Messages are short and each is followed by a wait for its answer, so Nagle's algorithm would delay them.
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        prove_to(connection, secret, purpose)
    except OSError:
        connection.close()
        raise
    return connection


def prove_to(connection: socket.socket, secret: bytes, purpose: str) -> None:
    """Perform the client's part of the handshake on a blocking connection with a timeout.

    Raises HandshakeError, or OSError if the connection is lost. A server closes connections during the handshake if too
    many arrive at the same time."""
    answer = Answer(secret, purpose, _receive(connection, NONCE_BYTES))
    connection.sendall(answer.content)
    answer.check(_receive(connection, PROOF_BYTES))


def _prove(secret: bytes, side: str, purpose: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    # Without the separator, another pair of side and purpose could yield the same bytes.
    content = b"\0".join((side.encode(), purpose.encode(), server_nonce + client_nonce))
    return hmac.digest(secret, content, "sha256")


def _receive(connection: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = connection.recv(size - len(received))
        if not piece:
            raise ConnectionResetError("the other end closed the connection during the handshake")
        received += piece
    return received
