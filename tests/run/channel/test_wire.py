"""A wire between the hub and an agent: messages as lines, however their bytes arrive."""

from __future__ import annotations

import errno
import hmac
import socket
import time
from collections.abc import Iterator

import pytest

from trainspec_cli.core.wire.handshake import ANSWER_BYTES, NONCE_BYTES
from trainspec_cli.run.channel import wire as wires
from trainspec_cli.run.channel.messages import Beat, GroupExited, encode
from trainspec_cli.run.channel.wire import Wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    """A wire, and the socket of its peer."""
    ours, theirs = socket.socketpair()
    wire = Wire(ours)
    yield wire, theirs
    wire.close()
    theirs.close()


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_message_may_arrive_in_pieces(ends: tuple[Wire, socket.socket], cut: int) -> None:
    wire, peer = ends
    first, second = GroupExited(0, 1, 0), GroupExited(1, 2, -9)
    peer.sendall(encode(first) + encode(second)[:cut])
    assert wire.receive() == [first]
    assert wire.receive() == []
    peer.sendall(encode(second)[cut:])
    assert wire.receive() == [second]
    assert not wire.closed


def test_messages_before_the_end_of_a_connection_are_received(ends: tuple[Wire, socket.socket]) -> None:
    wire, peer = ends
    peer.sendall(encode(GroupExited(0, 1, 0)))
    peer.close()
    assert (wire.receive(), wire.closed) == ([GroupExited(0, 1, 0)], True)


def test_beats_are_sent_at_their_interval_and_not_received_as_messages(
    ends: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, peer = ends
    now = [wire._beat_at]
    monkeypatch.setattr(wires.time, "monotonic", lambda: now[0])
    sizes = []
    for waited_s in (0.9, 0.1, 0.9, 0.2):
        now[0] += waited_s * wires.BEAT_INTERVAL_S
        wire.beat()
        sizes.append(len(peer.recv(4096, socket.MSG_PEEK | socket.MSG_DONTWAIT)) // len(encode(Beat())) if sizes else 0)
    assert sizes == [0, 1, 1, 2]
    assert Wire(peer).receive() == []


def test_silence_is_counted_from_what_was_heard_last(
    ends: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, peer = ends
    now = [time.monotonic()]
    monkeypatch.setattr("trainspec_cli.run.backend.hub.time.monotonic", lambda: now[0])
    wire._received_at = now[0]
    now[0] += 3.0
    wire.receive()
    assert wire.silent_s == 3.0
    peer.sendall(encode(GroupExited(0, 1, 0)))
    wire.receive()
    assert wire.silent_s == 0.0


def test_what_is_no_message_closes_the_wire_after_what_came_before(ends: tuple[Wire, socket.socket]) -> None:
    wire, peer = ends
    peer.sendall(encode(GroupExited(0, 1, 0)) + b"nonsense\n" + encode(GroupExited(0, 2, 0)))
    assert wire.receive() == [GroupExited(0, 1, 0)]
    assert wire.closed and "'nonsense'" in wire.fault
    assert peer.recv(1) == b"", "the connection is closed"


@pytest.mark.parametrize("fill", ["a line without an end", "a peer that does not read"])
def test_a_wire_holds_so_much_and_no_more(
    ends: tuple[Wire, socket.socket], monkeypatch: pytest.MonkeyPatch, fill: str
) -> None:
    wire, peer = ends
    monkeypatch.setattr(wires, "LINE_BYTES", 50_000)
    if fill == "a line without an end":
        peer.sendall(b"x" * 50_000)
        assert (wire.receive(), wire.closed) == ([], False)
        peer.sendall(b"x")
        wire.receive()
    else:
        for _ in range(50_000):
            wire.send(GroupExited(0, 1, 0))
            if wire.closed:
                break
    assert wire.closed


def test_what_a_full_connection_does_not_take_is_sent_later(ends: tuple[Wire, socket.socket]) -> None:
    wire, peer = ends
    message = GroupExited(0, 1, 0)
    sent = 0
    while not wire._unsent:
        wire.send(message)
        sent += 1
    other = Wire(peer)
    received = len(other.receive())
    wire.send(message)
    assert received + len(other.receive()) == sent + 1 and not wire.closed


def test_sending_to_who_has_gone_closes_the_wire(ends: tuple[Wire, socket.socket]) -> None:
    wire, peer = ends
    peer.close()
    wire.send(GroupExited(0, 1, 0))
    wire.send(GroupExited(0, 1, 0))
    assert wire.closed


@pytest.mark.parametrize(("refusals", "heard"), [(2, True), (100, False)])
def test_a_busy_hub_is_called_again_for_a_while(monkeypatch: pytest.MonkeyPatch, refusals: int, heard: bool) -> None:
    ours, theirs = socket.socketpair()
    calls, now = [], [0.0]

    def connect(*given: object) -> socket.socket:
        calls.append(given)
        if len(calls) <= refusals:
            raise ConnectionResetError
        return ours

    monkeypatch.setattr(wires, "connect", connect)
    monkeypatch.setattr(wires, "CALL_TIMEOUT_S", 10 * wires.RETRY_S)
    monkeypatch.setattr(wires.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(wires.time, "sleep", lambda seconds: now.append(now.pop() + seconds))
    if heard:
        assert not wires.call_hub(("a", 1), b"secret").closed
        assert calls == [(("a", 1), b"secret", wires.PURPOSE)] * 3
    else:
        with pytest.raises(ConnectionResetError):
            wires.call_hub(("a", 1), b"secret")
        assert 10 <= len(calls) <= 12
    ours.close()
    theirs.close()


def test_a_pending_peer_becomes_a_wire_by_its_proof_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        pending = wires.PendingPeer(ours, b"secret")
        nonces = theirs.recv(NONCE_BYTES) + b"n" * NONCE_BYTES
        client, server = (
            hmac.digest(b"secret", side + b"\0hub\0" + nonces, "sha256") for side in (b"client", b"server")
        )
        assert pending.advance() is None
        theirs.sendall(b"n" * NONCE_BYTES)
        assert pending.advance() is None
        theirs.sendall(client + encode(GroupExited(0, 1, 0)))
        wire = pending.advance()
        assert wire is not None and wire.receive() == [GroupExited(0, 1, 0)]
        assert theirs.recv(100) == server


@pytest.mark.parametrize("ending", ["silence", "the other end goes", "a wrong proof"])
def test_a_pending_peer_without_proof_is_given_up(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    ours, theirs = socket.socketpair()
    now = [time.monotonic()]
    monkeypatch.setattr(wires.time, "monotonic", lambda: now[0])
    with ours, theirs:
        pending = wires.PendingPeer(ours, b"secret")
        now[0] += wires.TIMEOUT_S
        assert pending.advance() is None
        if ending == "silence":
            now[0] += 0.1
        elif ending == "the other end goes":
            theirs.close()
        else:
            theirs.sendall(bytes(ANSWER_BYTES))
        with pytest.raises(OSError, match=r"did not authenticate in time|was closed|"):
            pending.advance()
        pending.close()
        assert ours.fileno() == -1


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only on Linux")
def test_a_peer_whose_system_is_off_is_told_from_one_that_closed_its_connection(
    ends: tuple[Wire, socket.socket],
) -> None:
    """The system closes a connection whose data is not acknowledged in time, with an error of its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        for timeout_s, limit_s in ((5.0, 2.0), (30.0, 3.75), (120.0, 15.0)):
            remote = Wire(socket.create_connection(server.getsockname()), timeout_s)
            limit_ms = remote._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert limit_ms == remote.unreachable_s * 1000 == limit_s * 1000
        remote._connection.close()

        class Unreachable:
            def send(self, data: bytes) -> int:
                raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

        remote._connection = Unreachable()  # type: ignore[assignment]
        remote.send(Beat())
        assert remote.closed and remote.is_unreachable
    wire, peer = ends
    peer.close()
    wire.receive()
    assert wire.closed and not wire.is_unreachable
