"""A wire between the hub and an agent: messages as lines, however their bytes arrive."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from trainspec_cli.launch.backend.nodes.messages import GroupExited, encode
from trainspec_cli.launch.backend.nodes.wire import Wire


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
