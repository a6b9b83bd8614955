"""The hub and the agents' end of the wire, over real sockets."""

from __future__ import annotations

import contextlib
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lab.agents import SECRET, connect_agent
from lab.waiting import PATIENCE_S

from trainspec_cli.core.wire import handshake
from trainspec_cli.recipe.results.doctor import Check, NodeReport
from trainspec_cli.recipe.results.tools import SpeedResult
from trainspec_cli.run.backend import hub as hub_module
from trainspec_cli.run.backend.hub import Came, Hub, Lost, News
from trainspec_cli.run.channel.messages import (
    Beat,
    EndAgent,
    Goodbye,
    GroupExited,
    Hello,
    Message,
    NodeExamined,
    StartGroup,
    StopWorkers,
    decode,
    encode,
)
from trainspec_cli.run.channel.wire import LINE_BYTES, Wire
from trainspec_cli.run.job.machine import listen

TIMEOUT_S = PATIENCE_S
"""Longer than a busy machine holds any of these tests up; those that wait for it set a shorter one."""
HERE = "127.0.0.1"
REPORT = NodeReport("a b", 1.5, (Check("disk", "ok", "9 GB, é"),), SpeedResult("2.13", None, None, 2, 1e12, 1e9, 1))
NEWS: list[News] = []
"""News that the hub has reported in this test."""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("trainspec_cli.run.channel.wire.BEAT_INTERVAL_S", 0.1)
    NEWS.clear()
    made = Hub(2, SECRET, listen(HERE), timeout_s=TIMEOUT_S, join_timeout_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def call(hub: Hub) -> Iterator[Callable[..., Wire]]:
    wires: list[Wire] = []

    def connect(node: int, hostname: str = "host") -> Wire:
        wires.append(connect_agent(hub, poll=lambda: NEWS.extend(hub.poll())))
        wires[-1].send(Hello(node, hostname))
        return wires[-1]

    yield connect
    for wire in wires:
        wire.close()


def poll_until(hub: Hub, holds: Callable[[], object], *wires: Wire) -> list[News]:
    """-> what was reported since the last call."""
    while not holds():
        for wire in wires:
            wire.beat()
        NEWS.extend(hub.poll())
        time.sleep(0.01)
    news = NEWS.copy()
    NEWS.clear()
    return news


def send_line(wire: Wire, line: bytes) -> None:
    wire._connection.sendall(line + b"\n")


def test_agents_come_and_leave(hub: Hub, call) -> None:
    agents = [call(node, f"host{node}") for node in (0, 1)]
    news = poll_until(hub, lambda: all(node.wire for node in hub.nodes), *agents)
    assert news == [(hub.nodes[0], Came()), (hub.nodes[1], Came())]
    assert [node.name for node in hub.nodes] == ["node 0 (host0)", "node 1 (host1)"]
    agents[0].send(GroupExited(0, 1, -9))
    agents[0].send(Goodbye())
    news = poll_until(hub, lambda: hub.nodes[0].is_gone, agents[1])
    assert news == [(hub.nodes[0], GroupExited(0, 1, -9)), (hub.nodes[0], Goodbye())]
    assert [node.is_connected for node in hub.nodes] == [False, True]


def test_a_message_reaches_every_agent(hub: Hub, call) -> None:
    agents = [call(node) for node in (0, 1)]
    poll_until(hub, lambda: all(node.wire for node in hub.nodes), *agents)
    hub.send(StopWorkers(None))
    received: list[Message] = []
    poll_until(hub, lambda: received.extend(agents[1].receive()) or received, *agents)
    assert received == [StopWorkers(None)]


def test_who_does_not_know_the_secret_is_sent_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.run.channel.wire.CALL_TIMEOUT_S", 0.0)
    with pytest.raises(ConnectionError):
        connect_agent(hub, secret=b"x" * 32)
    assert [node.wire for node in hub.nodes] == [None, None]


def test_a_recorded_handshake_opens_nothing(hub: Hub) -> None:
    """The answer that an agent gave once is wrong for the nonce of another connection."""
    answers: list[bytes] = []
    let_in: list[int] = []
    for _ in range(2):
        with socket.create_connection((HERE, hub.port)) as connection:
            connection.settimeout(20)
            poll_until(hub, lambda: hub._pending)
            nonce = connection.recv(32)
            own = b"n" * 32
            answers.append(own + handshake._prove(SECRET, "client", "hub", nonce, own))
            connection.sendall(answers[0])
            poll_until(hub, lambda: not hub._pending)
            let_in.append(len(hub._newcomers))
        poll_until(hub, lambda: not hub._newcomers)
    assert let_in == [1, 0]


def test_idle_strangers_keep_no_agent_out(hub: Hub, call) -> None:
    """More of them than a process may have open files by default, on some systems."""
    strangers = [socket.create_connection((HERE, hub.port)) for _ in range(700)]
    poll_until(hub, lambda: len(hub._pending) == hub._max_pending)
    agent = call(0)
    poll_until(hub, lambda: hub.nodes[0].wire, agent)
    assert len(hub._pending) <= hub._max_pending
    for stranger in strangers:
        stranger.close()


def test_a_lasting_flood_keeps_no_agent_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """More unknown clients connect between two polls than one poll accepts; a limit per poll would drop every agent."""
    monkeypatch.setattr(hub_module, "MAX_ACCEPTED", 16)
    hub._max_pending = hub_module.max_pending(2)
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((HERE, hub.port), 1):
                pass

    flooding = [threading.Thread(target=flood) for _ in range(2)]
    for thread in flooding:
        thread.start()
    try:
        wire = connect_agent(hub)
        wire.send(Hello(0, "host"))
        poll_until(hub, lambda: hub.nodes[0].wire, wire)
        wire.close()
    finally:
        over.set()
        for thread in flooding:
            thread.join(20)


def test_a_hub_without_descriptors_goes_on(hub: Hub, call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers are sent away for a newcomer, and the hub serves its members."""
    agent = call(0)
    poll_until(hub, lambda: hub.nodes[0].wire, agent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.create_connection((HERE, hub.port)) for _ in range(20)]
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        for _ in range(5):
            hub.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    agent.send(Goodbye())
    poll_until(hub, lambda: hub.nodes[0].has_left)
    for stranger in strangers:
        stranger.close()


def test_a_stranger_is_heard_for_no_more_than_a_handshake(hub: Hub) -> None:
    with socket.create_connection((HERE, hub.port)) as stranger:
        stranger.sendall(b"x" * 2**16)
        stranger.settimeout(PATIENCE_S)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := _receive_while_polling(stranger, hub):
                received += piece
    assert len(received) <= 32, "the nonce, and nothing more"
    assert not hub._newcomers


def _receive_while_polling(stranger: socket.socket, hub: Hub) -> bytes:
    with selectors.DefaultSelector() as selector:  # any descriptor, as there are many after other tests
        selector.register(stranger, selectors.EVENT_READ)
        poll_until(hub, lambda: selector.select(0))
    return stranger.recv(100)


def test_a_stranger_that_says_nothing_is_sent_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.run.channel.wire.TIMEOUT_S", 0.2)
    with socket.create_connection((HERE, hub.port)):
        poll_until(hub, lambda: hub._pending)
        poll_until(hub, lambda: not hub._pending)


MALFORMED = [
    *(b"", b"ended 0", b"[", b"5", b"null", b"[]", b"{}", b"\xff\xfe", b'"Goodbye"', b'{"kind": "Nonsense"}'),
    *(b'{"kind": []}', b'{"kind": {}}', b'{"kind": "GroupExited", "group": 0, "number": 1}'),
    b'{"kind": "GroupExited", "group": 0, "number": 1, "exit_code": 1e9}',
    b'{"kind": "GroupExited", "group": 0, "number": 1, "exit_code": -65}',
    b'{"kind": "GroupExited", "group": 0, "number": 1, "exit_code": 1.5}',
    b'{"kind": "GroupExited", "group": "0", "number": 1, "exit_code": 0}',
    b'{"kind": "GroupExited", "group": 0, "number": 1, "exit_code": ' + b"9" * 5000 + b"}",
    b'{"kind": "GroupExited", "group": 0, "number": 1, "exit_code": 0, "left_behind": 5}',
    b'{"kind": "WorkerExited", "group": 0, "number": 1, "rank": 0, "summary": "\\u0000"}',
    *(b'{"kind": "Goodbye", "more": 1}', b"[" * 5000),
    *(b'{"kind": "NodeExamined", "report": 5}', b'{"kind": "NodeExamined", "report": {"host": "a"}}'),
    b'{"kind": "Hello", "node": 1, "hostname": "sound"}',
    b'{"kind": "StartGroup", "group": 0, "number": 1}',
]


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
def test_an_agent_that_sends_nonsense_is_lost_and_no_other(hub: Hub, call, line: bytes) -> None:
    mad, sound = call(0, "mad"), call(1, "sound")
    mad.send(GroupExited(0, 1, 0))
    send_line(mad, line + b"\n" + encode(GroupExited(0, 1, 1)).strip())
    news = poll_until(hub, lambda: hub.nodes[0].loss, sound)
    assert "invalid message" in hub.nodes[0].loss
    assert [message for node, message in news if node.node == 0] == [Came(), GroupExited(0, 1, 0), Lost()]
    assert hub.nodes[1].loss == ""


@pytest.mark.parametrize(
    "message", [Beat(), Hello(3, "a b"), NodeExamined(REPORT), GroupExited(1, 2, None, (3, 4)), EndAgent()]
)
def test_a_message_is_one_line_and_comes_back(message: Message) -> None:
    assert decode(encode(message)) == message
    assert encode(message).count(b"\n") == 1


def test_an_agent_whose_line_has_no_end_is_cut_off(hub: Hub, call) -> None:
    mad, sound = call(0, "mad"), call(1, "sound")
    poll_until(hub, lambda: all(node.wire for node in hub.nodes), sound)
    mad._connection.settimeout(PATIENCE_S)

    def pour() -> None:
        with contextlib.suppress(OSError):
            mad._connection.sendall(b"x" * (4 * LINE_BYTES))

    pouring = threading.Thread(target=pour)
    pouring.start()
    poll_until(hub, lambda: hub.nodes[0].loss, sound)
    pouring.join(20)
    assert hub.nodes[1].loss == ""


@pytest.mark.parametrize("message", [Hello(2, "host"), Hello(-1, "host"), Goodbye(), StartGroup(0, 1)])
def test_who_introduces_itself_wrongly_is_sent_away(hub: Hub, message: Message) -> None:
    stranger = connect_agent(hub)
    stranger.send(message)
    assert poll_until(hub, lambda: stranger.receive() or stranger.closed) == []
    assert [node.wire for node in hub.nodes] == [None, None]


def test_who_begins_with_nonsense_is_sent_away(hub: Hub) -> None:
    stranger = connect_agent(hub)
    send_line(stranger, b"hello 0 host")
    assert poll_until(hub, lambda: stranger.receive() or stranger.closed) == []
    assert [node.wire for node in hub.nodes] == [None, None]


def test_a_node_that_has_an_agent_takes_no_second(hub: Hub, call) -> None:
    first = call(0, "first")
    poll_until(hub, lambda: hub.nodes[0].wire, first)
    second = call(0, "second")
    poll_until(hub, lambda: second.receive() or second.closed, first)
    assert hub.nodes[0].hostname == "first"


@pytest.mark.slow
def test_a_silent_agent_is_lost_and_a_beating_one_is_not(hub: Hub, call) -> None:
    hub._timeout_s = 3.0
    alive, _silent = call(0, "alive"), call(1, "silent")
    news = poll_until(hub, lambda: hub.nodes[1].loss, alive)
    assert "sent nothing for 3 s" in hub.nodes[1].loss
    assert hub.nodes[0].loss == ""
    assert news[-1] == (hub.nodes[1], Lost())


def test_an_agent_that_is_killed_is_lost_at_once(hub: Hub, call) -> None:
    agent = call(1)
    poll_until(hub, lambda: hub.nodes[1].wire, agent)
    agent.close()
    poll_until(hub, lambda: hub.nodes[1].loss)
    assert "without notice" in hub.nodes[1].loss


def test_who_never_comes_is_lost() -> None:
    NEWS.clear()
    hub = Hub(1, SECRET, listen(HERE), timeout_s=1.0, join_timeout_s=0.0)
    news = poll_until(hub, lambda: hub.nodes[0].is_gone)
    assert "not join within 0 s" in hub.nodes[0].loss
    assert news == [(hub.nodes[0], Lost())]
    hub.close()


def test_a_report_is_kept(hub: Hub, call) -> None:
    agent = call(0)
    agent.send(NodeExamined(REPORT))
    poll_until(hub, lambda: hub.nodes[0].report is not None, agent)
    assert hub.nodes[0].report is not None
    assert replace(hub.nodes[0].report, heard_at=None) == REPORT
    assert abs((hub.nodes[0].report.heard_at or 0) - time.time()) < 60


@pytest.mark.parametrize("welcomes_back", [True, False])
def test_a_lost_node_comes_back_where_it_is_welcome(welcomes_back: bool) -> None:
    hub = Hub(1, SECRET, listen(HERE), timeout_s=TIMEOUT_S, join_timeout_s=PATIENCE_S, welcomes_back=welcomes_back)
    agents = [_call(hub)]
    poll_until(hub, lambda: hub.nodes[0].wire, *agents)
    agents[0].close()
    poll_until(hub, lambda: hub.nodes[0].loss)
    lost = hub.nodes[0]
    agents.append(_call(hub))
    poll_until(hub, lambda: hub.nodes[0] is not lost or agents[1].receive() or agents[1].closed)
    assert (hub.nodes[0] is not lost, lost.is_gone) == (welcomes_back, True)
    hub.close()
    agents[1].close()


def _call(hub: Hub) -> Wire:
    wire = connect_agent(hub)
    wire.send(Hello(0, "host"))
    return wire
