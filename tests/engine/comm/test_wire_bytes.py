"""What is written to TCP connections is counted to the byte, by purpose, and nothing else is touched."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainspec_cli.core.environment_names import RENDEZVOUS
from trainspec_cli.engine.comm.codec import OTHER, WireMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counted by Linux")


def connected() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = connected()
    with near, far:
        yield near, far


def test_bytes_are_divided_by_purpose(ends: tuple[socket.socket, socket.socket]) -> None:
    meter = WireMeter()
    ends[0].sendall(b"x" * 5)
    meter.find_connections()
    before = dict(meter.counted)
    with meter.purpose("gradients"):
        ends[0].sendall(b"x" * 1000)
    ends[0].sendall(b"x" * 30)
    with meter.purpose("parameters"):
        ends[1].sendall(b"x" * 200)
    found = meter.totals()
    assert (found["gradients"], found["parameters"], found[OTHER] - before[OTHER]) == (1000, 200, 30)


def test_reserved_connections_keep_their_purpose_whatever_goes_on_meanwhile(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """An exchange in another thread; the main thread gathers parameters through the other end."""
    meter = WireMeter()
    meter.find_connections()
    ends[0].sendall(b"x" * 5)
    reserved = [(end.fileno(), os.fstat(end.fileno()).st_ino) for end in (ends[0], ends[1])]
    meter.reserve(reserved[:1], "gradients")
    meter.reserve(reserved[1:], "parameters of another thread")
    meter.release(reserved[1:])
    with meter.purpose("parameters"):
        ends[0].sendall(b"x" * 1000)
        ends[1].sendall(b"x" * 200)
    ends[0].sendall(b"x" * 30)
    meter.release(reserved[:1])
    ends[0].sendall(b"x" * 7)
    found = meter.totals()
    assert (found["gradients"], found["parameters"], found[OTHER]) == (1030, 200, 5 + 7)


def test_bytes_that_the_peer_has_not_taken_yet_count(ends: tuple[socket.socket, socket.socket]) -> None:
    """They wait in the kernel's buffer."""
    meter = WireMeter()
    meter.find_connections()
    ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ends[0].setblocking(False)
    written = 0
    with meter.purpose("gradients"):
        try:
            while True:
                written += ends[0].send(b"x" * 4096)
        except BlockingIOError:
            pass
    assert meter.counted["gradients"] == written > 4096


def test_other_descriptors_stay_as_they_are(ends: tuple[socket.socket, socket.socket], tmp_path: Path) -> None:
    reading, writing = os.pipe()
    pair = socket.socketpair()
    with (tmp_path / "file").open("w") as file, pair[0], pair[1]:
        meter = WireMeter()
        for _ in range(3):
            meter.find_connections()
        os.write(writing, b"a")
        file.write("b")
        pair[0].sendall(b"c")
        ends[0].sendall(b"d")
        assert (os.read(reading, 1), pair[1].recv(1), ends[1].recv(1)) == (b"a", b"c", b"d")
    os.close(reading)
    os.close(writing)


def test_a_connection_is_not_held_open(ends: tuple[socket.socket, socket.socket]) -> None:
    """A peer that waits on it notices immediately that it was dropped; a new one with its number counts from zero."""
    meter = WireMeter()
    meter.find_connections()
    with meter.purpose("gradients"):
        ends[0].sendall(b"x" * 7)
    number = ends[0].fileno()
    ends[0].close()
    assert ends[1].recv(100) == b"x" * 7
    assert ends[1].recv(100) == b"", "closed"
    near, far = connected()
    with near, far:
        assert near.fileno() == number or far.fileno() == number
        meter.find_connections()
        with meter.purpose("gradients"):
            near.sendall(b"x" * 3)
        assert meter.counted["gradients"] == 10


def test_connections_to_the_rendezvous_server_do_not_count(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RENDEZVOUS, f"127.0.0.1:{ends[0].getpeername()[1]}")
    meter = WireMeter()
    meter.find_connections()
    with meter.purpose("gradients"):
        ends[0].sendall(b"x" * 1000)
        ends[1].sendall(b"x" * 10)
    assert meter.counted["gradients"] == 10
