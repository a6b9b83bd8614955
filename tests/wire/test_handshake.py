"""Both ends of a handshake, over real sockets."""

from __future__ import annotations

import socket
import threading

import pytest

from trainspec_cli.wire.handshake import ANSWER_BYTES, Challenge, HandshakeError, prove_to

SECRET = b"s" * 32


def serve(connection: socket.socket, secret: bytes, purpose: str = "test") -> list[str]:
    """The server's half; returns what it found."""
    challenge = Challenge(secret, purpose)
    connection.sendall(challenge.nonce)
    answer = b""
    while len(answer) < ANSWER_BYTES:
        answer += connection.recv(ANSWER_BYTES - len(answer))
    try:
        connection.sendall(challenge.accept(answer))
    except HandshakeError as error:
        connection.close()
        return [str(error)]
    return []


def meet(server_secret: bytes, client_secret: bytes, purpose: str = "test") -> tuple[list[str], type[Exception] | None]:
    server, client = socket.socketpair()
    client.settimeout(20)
    found: list[str] = []
    serving = threading.Thread(target=lambda: found.extend(serve(server, server_secret)))
    serving.start()
    raised = None
    try:
        prove_to(client, client_secret, purpose)
    except OSError as error:
        raised = type(error)
    serving.join(20)
    client.close()
    server.close()
    return found, raised


def test_both_know_the_secret() -> None:
    assert meet(SECRET, SECRET) == ([], None)


def test_a_client_that_does_not_is_found_out() -> None:
    assert meet(SECRET, b"x" * 32) == (["the client does not know the job's secret"], ConnectionResetError)


def test_a_proof_for_another_purpose_opens_nothing() -> None:
    assert meet(SECRET, SECRET, purpose="other") == (
        ["the client does not know the job's secret"],
        ConnectionResetError,
    )


def test_a_server_that_does_not_know_the_secret_is_found_out() -> None:
    """Someone else listens on the port: it accepts whatever comes, and proves nothing."""
    server, client = socket.socketpair()
    client.settimeout(20)
    server.sendall(b"n" * 32 + b"p" * 32)
    with pytest.raises(HandshakeError, match="the server does not know the job's secret"):
        prove_to(client, SECRET, "test")


def test_a_clients_proof_does_not_serve_as_the_servers() -> None:
    """Else someone without the secret could answer a client with its own words."""
    challenge = Challenge(SECRET, "test")
    server, client = socket.socketpair()
    client.settimeout(20)
    server.sendall(challenge.nonce)

    def reflect() -> None:
        answer = server.recv(ANSWER_BYTES)
        server.sendall(answer[32:])

    reflecting = threading.Thread(target=reflect)
    reflecting.start()
    with pytest.raises(HandshakeError):
        prove_to(client, SECRET, "test")
    reflecting.join(20)


def test_nonces_are_fresh() -> None:
    assert len({Challenge(SECRET, "test").nonce for _ in range(100)}) == 100
