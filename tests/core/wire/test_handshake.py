"""Both ends of a handshake, over real sockets."""

from __future__ import annotations

import socket
import threading

import pytest

from trainspec_cli.core.wire.handshake import ANSWER_BYTES, TIMEOUT_S, Challenge, HandshakeError, connect, prove_to

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


NO_CLIENT = "the client does not know the job's secret"


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
    assert meet(SECRET, b"x" * 32) == ([NO_CLIENT], ConnectionResetError)


def test_a_proof_for_another_purpose_opens_nothing() -> None:
    assert meet(SECRET, SECRET, purpose="other") == (
        [NO_CLIENT],
        ConnectionResetError,
    )


def test_a_server_that_does_not_know_the_secret_is_found_out() -> None:
    """Someone else listens on the port: it accepts whatever comes, and proves nothing."""
    server, client = socket.socketpair()
    client.settimeout(20)
    server.sendall(b"n" * 32 + b"p" * 32)
    with pytest.raises(HandshakeError, match="the server"):
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


def test_a_handshake_may_come_in_pieces_and_what_follows_it_is_not_read() -> None:
    server, client = socket.socketpair()
    client.settimeout(20)
    challenge = Challenge(SECRET, "test")

    def answer() -> None:
        for byte in challenge.nonce:
            server.sendall(bytes([byte]))
        received = b""
        while len(received) < ANSWER_BYTES:
            received += server.recv(ANSWER_BYTES)
        proof = challenge.accept(received)
        server.sendall(proof[:5])
        server.sendall(proof[5:] + b"the first line")

    answering = threading.Thread(target=answer)
    answering.start()
    prove_to(client, SECRET, "test")
    answering.join(20)
    assert client.recv(100) == b"the first line"


@pytest.mark.parametrize("sent", [b"", b"n" * 31, b"n" * 32, b"n" * 32 + b"p" * 31])
def test_a_server_that_leaves_in_the_midst_is_an_error(sent: bytes) -> None:
    server, client = socket.socketpair()
    client.settimeout(20)
    server.sendall(sent)
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError, match="during the handshake"):
        prove_to(client, SECRET, "test")


def client_answer(challenge: Challenge, secret: bytes = SECRET) -> bytes:
    """What a client answers to a challenge."""
    server, client = socket.socketpair()
    server.sendall(challenge.nonce)
    server.shutdown(socket.SHUT_WR)
    with pytest.raises(ConnectionResetError):
        prove_to(client, secret, challenge.purpose)
    return server.recv(2 * ANSWER_BYTES)


def test_a_recorded_answer_opens_no_other_connection() -> None:
    challenge = Challenge(SECRET, "test")
    answer = client_answer(challenge)
    assert len(answer) == ANSWER_BYTES == 64
    assert len(challenge.accept(answer)) == 32
    for other in (Challenge(SECRET, "test"), Challenge(SECRET, "other", challenge.nonce)):
        with pytest.raises(HandshakeError):
            other.accept(answer)


@pytest.mark.parametrize("place", [0, 31, 32, 63])
def test_an_answer_that_was_altered_or_cut_is_refused(place: int) -> None:
    challenge = Challenge(SECRET, "test")
    answer = bytearray(client_answer(challenge))
    answer[place] ^= 1
    for wrong in (bytes(answer), client_answer(challenge)[:place], client_answer(challenge) + b"\0"):
        with pytest.raises(HandshakeError, match=NO_CLIENT):
            challenge.accept(wrong)


def test_a_servers_proof_answers_the_clients_own_nonce() -> None:
    challenge = Challenge(SECRET, "test")
    proofs = {challenge.accept(client_answer(challenge)) for _ in range(3)}
    assert len(proofs) == 3


def test_a_connection_that_cannot_be_authenticated_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[socket.socket] = []
    create = socket.create_connection

    def create_connection(address: tuple[str, int], timeout_s: float) -> socket.socket:
        assert timeout_s == TIMEOUT_S
        opened.append(create(address, timeout_s))
        stranger, _ = listening.accept()
        stranger.sendall(b"n" * 32 + b"p" * 32)
        strangers.append(stranger)
        return opened[0]

    strangers: list[socket.socket] = []
    monkeypatch.setattr("socket.create_connection", create_connection)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with pytest.raises(HandshakeError):
            connect(("127.0.0.1", listening.getsockname()[1]), SECRET, "test")
        assert opened[0].fileno() == -1
        strangers[0].close()


def test_a_connection_that_is_authenticated_sends_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def accept() -> None:
            connection, _ = listening.accept()
            serve(connection, SECRET)
            connection.recv(1)
            connection.close()

        serving = threading.Thread(target=accept)
        serving.start()
        with connect(("127.0.0.1", listening.getsockname()[1]), SECRET, "test") as connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert connection.gettimeout() == TIMEOUT_S
        serving.join(20)
