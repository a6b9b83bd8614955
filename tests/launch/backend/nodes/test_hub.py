"""The hub and the agents' end of the wire, over real sockets."""

from __future__ import annotations

import contextlib
import resource
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lab.agents import SECRET, connect_agent

from trainspec_cli.launch.backend.nodes import hub as hub_module
from trainspec_cli.launch.backend.nodes.hub import Hub
from trainspec_cli.launch.backend.nodes.wire import LINE_BYTES, Wire
from trainspec_cli.launch.job.place import listen
from trainspec_cli.wire import handshake

TIMEOUT_S = 0.6
HERE = "127.0.0.1"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("trainspec_cli.launch.backend.nodes.wire.BEAT_INTERVAL_S", 0.1)
    made = Hub(2, SECRET, listen(HERE), timeout_s=TIMEOUT_S, join_timeout_s=5.0)
    yield made
    made.close()


@pytest.fixture
def call(hub: Hub) -> Iterator[Callable[[str], Wire]]:
    wires: list[Wire] = []

    def connect(hello: str) -> Wire:
        wires.append(connect_agent(hub))
        wires[-1].say(hello)
        return wires[-1]

    yield connect
    for wire in wires:
        wire.close()


def poll_until(hub: Hub, holds: Callable[[], object], *wires: Wire) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        for wire in wires:
            wire.beat()
        hub.poll()
        time.sleep(0.01)


def test_agents_come_and_end(hub: Hub, call) -> None:
    agents = [call(f"hello {node} host{node}") for node in (0, 1)]
    poll_until(hub, lambda: all(member.wire for member in hub.members), *agents)
    assert [member.name for member in hub.members] == ["node 0 (host0)", "node 1 (host1)"]
    assert (hub.all_gone, hub.exit_code) == (False, None)
    agents[0].say("ended 0")
    agents[1].say("ended 3")
    poll_until(hub, lambda: hub.all_gone)
    assert hub.exit_code == 3


def test_a_word_reaches_every_agent(hub: Hub, call) -> None:
    agents = [call(f"hello {node} h") for node in (0, 1)]
    poll_until(hub, lambda: all(member.wire for member in hub.members), *agents)
    hub.tell("stop")
    heard: list[list[str]] = []
    poll_until(hub, lambda: heard.extend(agents[1].hear()) or heard, *agents)
    assert heard == [["stop"]]


def test_who_does_not_know_the_secret_is_sent_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.launch.backend.nodes.wire.CALL_TIMEOUT_S", 0.0)
    with pytest.raises(ConnectionError):
        connect_agent(hub, secret=b"x" * 32)
    assert [member.wire for member in hub.members] == [None, None]


def test_a_recorded_handshake_opens_nothing(hub: Hub) -> None:
    """The answer that an agent gave once is wrong for the nonce of another connection."""
    answers: list[bytes] = []
    let_in: list[int] = []
    for _ in range(2):
        with socket.create_connection((HERE, hub.port)) as connection:
            connection.settimeout(20)
            poll_until(hub, lambda: hub._knocks)
            nonce = connection.recv(32)
            own = b"n" * 32
            answers.append(own + handshake._prove(SECRET, "client", "hub", nonce, own))
            connection.sendall(answers[0])
            poll_until(hub, lambda: not hub._knocks)
            let_in.append(len(hub._newcomers))
        poll_until(hub, lambda: not hub._newcomers)
    assert let_in == [1, 0]


def test_idle_strangers_keep_no_agent_out(hub: Hub, call) -> None:
    """More of them than a process may have open files by default, on some systems."""
    strangers = [socket.create_connection((HERE, hub.port)) for _ in range(700)]
    poll_until(hub, lambda: len(hub._knocks) == hub._max_knocks)
    agent = call("hello 0 host")
    poll_until(hub, lambda: hub.members[0].wire, agent)
    assert len(hub._knocks) <= hub._max_knocks
    for stranger in strangers:
        stranger.close()


def test_a_lasting_flood_keeps_no_agent_out(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks come more strangers than are taken in at once; a bound of one look would drop every agent."""
    monkeypatch.setattr(hub_module, "MAX_ACCEPTED", 16)
    hub._max_knocks = hub_module.max_knocks(2)
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
        wire.say("hello 0 host")
        poll_until(hub, lambda: hub.members[0].wire, wire)
        wire.close()
    finally:
        over.set()
        for thread in flooding:
            thread.join(20)


def test_a_hub_without_descriptors_goes_on(hub: Hub, call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers are sent away for a newcomer, and the hub serves its members."""
    agent = call("hello 0 host")
    poll_until(hub, lambda: hub.members[0].wire, agent)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    strangers = [socket.create_connection((HERE, hub.port)) for _ in range(20)]
    used = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 4, hard))
    try:
        for _ in range(5):
            hub.poll()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    agent.say("ended 0")
    poll_until(hub, lambda: hub.members[0].exit_code == 0)
    for stranger in strangers:
        stranger.close()


def test_a_stranger_is_heard_for_no_more_than_a_handshake(hub: Hub) -> None:
    with socket.create_connection((HERE, hub.port)) as stranger:
        stranger.sendall(b"x" * 2**16)
        stranger.settimeout(20)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := _receive_while_polling(stranger, hub):
                received += piece
    assert len(received) <= 32, "the nonce, and nothing more"
    assert not hub._newcomers


def _receive_while_polling(stranger: socket.socket, hub: Hub) -> bytes:
    poll_until(hub, lambda: select.select([stranger], [], [], 0)[0])
    return stranger.recv(100)


def test_a_stranger_that_says_nothing_is_sent_away(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainspec_cli.launch.backend.nodes.wire.TIMEOUT_S", 0.2)
    with socket.create_connection((HERE, hub.port)):
        poll_until(hub, lambda: hub._knocks)
        poll_until(hub, lambda: not hub._knocks)


@pytest.mark.parametrize(
    "line",
    [
        *("ended", "ended x", "report", "report [", "report 5", 'report {"host": "a"}', "lost 1", "lost 0 1 x y"),
        *("done x 1", "done 0 1e9", "begin 0 1", "ended " + "9" * 5000),
    ],
)
def test_an_agent_that_says_nonsense_is_lost_and_no_other(hub: Hub, call, line: str) -> None:
    mad, sound = call("hello 0 mad"), call("hello 1 sound")
    mad.say(line)
    poll_until(hub, lambda: hub.members[0].loss, sound)
    assert "does not understand" in hub.members[0].loss
    assert hub.members[1].loss == ""


def test_an_agent_whose_line_has_no_end_is_cut_off(hub: Hub, call) -> None:
    mad, sound = call("hello 0 mad"), call("hello 1 sound")
    poll_until(hub, lambda: all(member.wire for member in hub.members), sound)
    mad._connection.settimeout(20)

    def pour() -> None:
        with contextlib.suppress(OSError):
            mad._connection.sendall(b"x" * (4 * LINE_BYTES))

    pouring = threading.Thread(target=pour)
    pouring.start()
    poll_until(hub, lambda: hub.members[0].loss, sound)
    pouring.join(20)
    assert hub.members[1].loss == ""


@pytest.mark.parametrize("hello", ["hello 2 host", "hello -1 host", "hello x host", "hello 0", "go"])
def test_who_introduces_itself_wrongly_is_sent_away(hub: Hub, call, hello: str) -> None:
    stranger = call(hello)
    poll_until(hub, lambda: stranger.hear() or stranger.closed)
    assert [member.wire for member in hub.members] == [None, None]


def test_a_seat_is_not_taken_twice(hub: Hub, call) -> None:
    first = call("hello 0 first")
    poll_until(hub, lambda: hub.members[0].wire, first)
    second = call("hello 0 second")
    poll_until(hub, lambda: second.hear() or second.closed, first)
    assert hub.members[0].host == "first"


def test_a_silent_agent_is_lost_and_a_beating_one_is_not(hub: Hub, call) -> None:
    alive, _silent = call("hello 0 alive"), call("hello 1 silent")
    poll_until(hub, lambda: hub.members[1].loss, alive)
    assert f"not been heard of for {TIMEOUT_S:g} s" in hub.members[1].loss
    assert hub.members[0].loss == ""


def test_an_agent_that_is_killed_is_lost_at_once(hub: Hub, call) -> None:
    agent = call("hello 1 host")
    poll_until(hub, lambda: hub.members[1].wire, agent)
    agent.close()
    poll_until(hub, lambda: hub.members[1].loss)
    assert "closed its connection without a word" in hub.members[1].loss


def test_who_never_comes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(1, SECRET, listen(HERE), timeout_s=1.0, join_timeout_s=0.0)
    poll_until(hub, lambda: hub.all_gone)
    assert hub.members[0].loss == "did not come within 0 s"
    hub.close()


def test_a_report_is_kept(hub: Hub, call) -> None:
    agent = call("hello 0 host")
    agent.say('report {"host": "a b", "time": 1.5, "checks": [{"name": "disk", "status": "ok", "found": "9 GB"}]}')
    poll_until(hub, lambda: hub.members[0].report is not None, agent)
    assert hub.members[0].report is not None
    assert (hub.members[0].report.host, hub.members[0].report.checks[0].found) == ("a b", "9 GB")


def test_a_lost_host_takes_its_seat_again_where_it_is_welcome() -> None:
    hub = Hub(1, SECRET, listen(HERE), timeout_s=TIMEOUT_S, join_timeout_s=5.0, welcomes_back=True)
    agents = [_call(hub)]
    poll_until(hub, lambda: hub.members[0].wire, *agents)
    agents[0].close()
    poll_until(hub, lambda: hub.members[0].loss)
    lost = hub.members[0]
    agents.append(_call(hub))
    poll_until(hub, lambda: hub.members[0] is not lost, agents[1])
    assert (hub.members[0].gone, lost.gone) == (False, True)
    hub.close()
    agents[1].close()


def _call(hub: Hub) -> Wire:
    wire = connect_agent(hub)
    wire.say("hello 0 host")
    return wire


def test_what_concerns_replica_groups_is_kept_for_them(hub: Hub, call) -> None:
    agent = call("hello 0 host")
    agent.say("done 0 1")
    poll_until(hub, lambda: hub.members[0].told, agent)
    assert hub.members[0].told == [["done", "0", "1"]]
