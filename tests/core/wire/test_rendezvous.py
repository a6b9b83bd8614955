"""A client of the rendezvous server, whose other end is a socket of the test."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator

import pytest

from trainspec_cli.core.wire import rendezvous
from trainspec_cli.core.wire.handshake import HandshakeError
from trainspec_cli.core.wire.rendezvous import RENDEZVOUS_PURPOSE, JsonClient

SECRET = b"s" * 32


class Clock:
    """Stands in for `time`: it passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0, "a retry pauses"
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    return clock


def connect_with(monkeypatch: pytest.MonkeyPatch, clock: Clock, *errors: Exception | None) -> list[float]:
    """Let the attempts to connect meet `errors` in turn (the last one again and again), and return their times."""
    attempts: list[float] = []

    def connect(address: tuple[str, int], secret: bytes, purpose: str) -> socket.socket:
        assert (address, secret, purpose) == (("::1", 4000), SECRET, RENDEZVOUS_PURPOSE)
        attempts.append(clock.now_s)
        error = errors[min(len(attempts), len(errors)) - 1]
        if error:
            raise error
        return socket.socketpair()[0]

    monkeypatch.setattr(rendezvous, "connect", connect)
    return attempts


def test_a_client_retries_until_the_server_listens(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    attempts = connect_with(monkeypatch, clock, ConnectionRefusedError(), ConnectionResetError(), None)
    JsonClient("::1:4000", SECRET, timeout_s=1.0).close()
    assert len(attempts) == 3


def test_a_client_gives_up_at_its_deadline(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    attempts = connect_with(monkeypatch, clock, ConnectionRefusedError("nobody listens"))
    with pytest.raises(ConnectionRefusedError, match="nobody listens"):
        JsonClient("::1:4000", SECRET, timeout_s=3.0)
    assert 103.0 <= attempts[-1] <= 103.5
    assert len(attempts) > 5


def test_a_server_with_another_secret_is_not_asked_again(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    attempts = connect_with(monkeypatch, clock, HandshakeError("the server does not know the job's secret"))
    with pytest.raises(HandshakeError):
        JsonClient("::1:4000", SECRET, timeout_s=3.0)
    assert attempts == [100.0]


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[JsonClient, socket.socket]]:
    """A client, and the server's end of its connection."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    monkeypatch.setattr(rendezvous, "connect", lambda *_: ours)
    made = JsonClient("host:1", SECRET, timeout_s=1.0)
    yield made, theirs
    made.close()
    theirs.close()


def test_a_request_is_one_line_and_its_answer_too(ends: tuple[JsonClient, socket.socket]) -> None:
    made, server = ends
    server.sendall(b'{"answer": 42}\n')
    assert made.ask({"key": "a\nb"}, timeout_s=20) == {"answer": 42}
    received = server.recv(1000)
    assert received.endswith(b"\n") and received.count(b"\n") == 1
    assert json.loads(received) == {"key": "a\nb"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        made.send({"loss": float("nan")})


def test_an_answer_may_take_longer_than_the_handshake(ends: tuple[JsonClient, socket.socket]) -> None:
    made, server = ends
    made._connection.settimeout(0.001)  # as the handshake leaves its own
    late = threading.Timer(0.05, server.sendall, [b'{"n": 1}\n'])
    late.start()
    assert made.receive(20) == {"n": 1}
    late.join()


def test_answers_arrive_one_by_one_however_their_bytes_are_cut(ends: tuple[JsonClient, socket.socket]) -> None:
    made, server = ends
    server.sendall(b'{"n": 1}\n{"n": 2}\n{"n"')
    assert [made.receive(20), made.receive(20)] == [{"n": 1}, {"n": 2}]
    with pytest.raises(TimeoutError):
        made.receive(0.01)
    server.sendall(b": 3}\n")
    assert made.receive(20) == {"n": 3}


def test_a_connection_that_ends_is_an_error_and_half_a_line_is_no_answer(
    ends: tuple[JsonClient, socket.socket],
) -> None:
    made, server = ends
    server.sendall(b'{"n": 1}')
    server.close()
    with pytest.raises(ConnectionResetError, match="closed the connection"):
        made.receive(20)


def test_a_line_that_never_ends_is_refused(
    ends: tuple[JsonClient, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, server = ends
    monkeypatch.setattr(rendezvous, "LINE_BYTES", 10)
    server.sendall(b'{"n": 10}\n')
    assert made.receive(20) == {"n": 10}
    server.sendall(b"12345678901")
    with pytest.raises(ConnectionError, match="too long"):
        made.receive(20)


def test_closing_wakes_a_thread_that_waits(ends: tuple[JsonClient, socket.socket]) -> None:
    made, _ = ends
    found: list[type[Exception]] = []

    def wait() -> None:
        try:
            made.receive(60)
        except OSError as error:
            found.append(type(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not made._connection.gettimeout():
        pass
    made.close()
    waiting.join(20)
    assert found
