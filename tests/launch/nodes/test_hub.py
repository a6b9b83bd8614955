"""The hub and the agents' end of the wire, over real sockets."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest

from trainspec_cli.launch.nodes.hub import Hub
from trainspec_cli.launch.nodes.wire import Wire

TIMEOUT_S = 0.6


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr("trainspec_cli.launch.nodes.wire.BEAT_INTERVAL_S", 0.1)
    made = Hub(2, "secret", timeout_s=TIMEOUT_S, join_timeout_s=5.0)
    yield made
    made.close()


@pytest.fixture
def call(hub: Hub) -> Iterator[Callable[[str], Wire]]:
    wires: list[Wire] = []

    def connect(hello: str) -> Wire:
        wires.append(Wire(socket.create_connection(("127.0.0.1", hub.port))))
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
    agents = [call(f"hello secret {node} host{node}") for node in (0, 1)]
    poll_until(hub, lambda: all(member.wire for member in hub.members), *agents)
    assert [member.name for member in hub.members] == ["node 0 (host0)", "node 1 (host1)"]
    assert (hub.all_gone, hub.exit_code) == (False, None)
    agents[0].say("ended 0")
    agents[1].say("ended 3")
    poll_until(hub, lambda: hub.all_gone)
    assert hub.exit_code == 3


def test_a_word_reaches_every_agent(hub: Hub, call) -> None:
    agents = [call(f"hello secret {node} h") for node in (0, 1)]
    poll_until(hub, lambda: all(member.wire for member in hub.members), *agents)
    hub.tell("stop")
    heard: list[list[str]] = []
    poll_until(hub, lambda: heard.extend(agents[1].hear()) or heard, *agents)
    assert heard == [["stop"]]


def test_who_does_not_know_the_token_is_sent_away(hub: Hub, call) -> None:
    stranger = call("hello guess 0 host")
    poll_until(hub, lambda: stranger.hear() or stranger.closed)
    assert hub.members[0].wire is None


def test_a_seat_is_not_taken_twice(hub: Hub, call) -> None:
    first = call("hello secret 0 first")
    poll_until(hub, lambda: hub.members[0].wire, first)
    second = call("hello secret 0 second")
    poll_until(hub, lambda: second.hear() or second.closed, first)
    assert hub.members[0].host == "first"


def test_a_silent_agent_is_lost_and_a_beating_one_is_not(hub: Hub, call) -> None:
    alive, _silent = call("hello secret 0 alive"), call("hello secret 1 silent")
    poll_until(hub, lambda: hub.members[1].loss, alive)
    assert f"not been heard of for {TIMEOUT_S:g} s" in hub.members[1].loss
    assert hub.members[0].loss == ""


def test_an_agent_that_is_killed_is_lost_at_once(hub: Hub, call) -> None:
    agent = call("hello secret 1 host")
    poll_until(hub, lambda: hub.members[1].wire, agent)
    agent.close()
    poll_until(hub, lambda: hub.members[1].loss)
    assert "closed its connection without a word" in hub.members[1].loss


def test_who_never_comes_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(1, "secret", timeout_s=1.0, join_timeout_s=0.0)
    poll_until(hub, lambda: hub.all_gone)
    assert hub.members[0].loss == "did not come within 0 s"
    hub.close()


def test_a_report_is_kept(hub: Hub, call) -> None:
    agent = call("hello secret 0 host")
    agent.say('report {"host": "a b", "checks": []}')
    poll_until(hub, lambda: hub.members[0].report is not None, agent)
    assert hub.members[0].report is not None
    assert hub.members[0].report["host"] == "a b"


def test_a_lost_host_takes_its_seat_again_where_it_is_welcome() -> None:
    hub = Hub(1, "secret", timeout_s=TIMEOUT_S, join_timeout_s=5.0, welcomes_back=True)
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
    wire = Wire(socket.create_connection(("127.0.0.1", hub.port)))
    wire.say("hello secret 0 host")
    return wire


def test_what_concerns_replica_groups_is_kept_for_them(hub: Hub, call) -> None:
    agent = call("hello secret 0 host")
    agent.say("done 0 1")
    poll_until(hub, lambda: hub.members[0].told, agent)
    assert hub.members[0].told == [["done", "0", "1"]]
