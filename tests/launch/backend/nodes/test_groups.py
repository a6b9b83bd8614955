"""Replica groups on four hosts as the first sees them; the agents' ends of the wires are here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lab.agents import SECRET, connect_agent

from trainspec_cli.environment_names import LAUNCH_ID
from trainspec_cli.launch.backend.nodes.agents import Agents
from trainspec_cli.launch.backend.nodes.groups import NodesGroups
from trainspec_cli.launch.backend.nodes.hub import Hub
from trainspec_cli.launch.backend.nodes.wire import Wire
from trainspec_cli.launch.job.job import Job
from trainspec_cli.launch.job.place import listen
from trainspec_cli.launch.rendezvous.address import Rendezvous
from trainspec_cli.rundir import generations
from trainspec_cli.rundir.secret import create_secret
from trainspec_cli.spec.results.plan import Plan

NOBODY = ("true",)
"""Instead of what starts agents."""


@pytest.fixture
def plan(make_plan) -> Plan:
    return replace(make_plan(), num_nodes=4, devices_per_node=2, replica_groups=2)


@pytest.fixture
def groups(plan: Plan, tmp_path: Path) -> Iterator[NodesGroups]:
    job = Job(tmp_path, NOBODY, {LAUNCH_ID: "secret"}, world_size=8, stop_grace_s=1.0, logs=tmp_path / "logs")
    job.logs.mkdir()
    hub = Hub(4, SECRET, listen("127.0.0.1"), timeout_s=60, join_timeout_s=60, welcomes_back=True)
    create_secret(job.run.secret(1))
    rendezvous = Rendezvous(job, plan.spec.resilience, job.run.secret(1), "127.0.0.1")
    made = NodesGroups(Agents(job, hub, rendezvous, None, generations.begin(job.run)), job, plan, 60.0)
    yield made
    made.end()


@pytest.fixture
def call(groups: NodesGroups) -> Iterator[Callable[[int], Wire]]:
    wires: list[Wire] = []

    def connect(node: int) -> Wire:
        wires.append(connect_agent(groups._agents.hub))
        wires[-1].say(f"hello {node} host{node}")
        return wires[-1]

    yield connect
    for wire in wires:
        wire.say("ended 0")
        wire.close()


@pytest.fixture
def wait_for(groups: NodesGroups) -> Callable[[Callable[[], object]], None]:
    def poll_until(holds: Callable[[], object]) -> None:
        deadline = time.monotonic() + 20
        while not holds():
            assert time.monotonic() < deadline, "waited in vain"
            groups.poll()
            time.sleep(0.01)

    return poll_until


def heard(wire: Wire, kind: str) -> list[list[str]]:
    return [words for words in wire.hear() if words[0] == kind]


@pytest.mark.parametrize(
    ("nodes", "groups", "expected"),
    [
        (4, 2, [[0, 1], [2, 3]]),
        (2, 4, [[0], [0], [1], [1]]),
        (1, 2, [[0], [0]]),
    ],
)
def test_a_group_has_hosts_of_its_own_or_shares_one(plan: Plan, nodes: int, groups: int, expected) -> None:
    sized = replace(plan, num_nodes=nodes, replica_groups=groups)
    assert [list(sized.nodes_of_group(group)) for group in range(groups)] == expected


def test_a_group_begins_when_all_of_its_hosts_are_there(groups: NodesGroups, call, wait_for) -> None:
    third = call(2)
    wait_for(lambda: groups._agents.hub.members[2].wire)
    assert groups.presence(1) == "awaited"
    fourth = call(3)
    wait_for(lambda: groups.presence(1) == "there")
    groups.start(1, 1)
    told: list[list[str]] = []
    wait_for(lambda: told or told.extend(heard(third, "begin")))
    assert told[0] == ["begin", "1", "1"], "the group, its start"
    wait_for(lambda: told[1:] or told.extend(heard(fourth, "begin")))
    assert told[0] == told[1]


def test_a_lost_worker_and_what_is_left_of_its_group(groups: NodesGroups, call, wait_for) -> None:
    agents = [call(2), call(3)]
    wait_for(lambda: groups.presence(1) == "there")
    start = groups.start(1, 2)
    agents[0].say("lost 1 1 4 of the start before")
    agents[1].say("lost 1 2 7 was killed by SIGKILL")
    wait_for(start.failure)
    failure = start.failure()
    assert failure is not None
    assert (failure.who, failure.host, failure.summary) == ("rank 7", "host3", "was killed by SIGKILL")
    start.end()
    agents[0].say("dropped 1 2")
    drops: list[list[str]] = []
    wait_for(lambda: drops or drops.extend(heard(agents[1], "drop")))
    assert drops == [["drop", "1", "2"]]
    assert not start.is_gone()
    agents[1].say("dropped 1 2")
    wait_for(start.is_gone)


def test_a_lost_host_takes_its_group_along_and_may_come_back(groups: NodesGroups, call, wait_for) -> None:
    agents = [call(node) for node in range(4)]
    wait_for(lambda: groups.presence(0) == groups.presence(1) == "there")
    starts = [groups.start(group, 1) for group in (0, 1)]
    agents[3].close()
    wait_for(starts[1].failure)
    failure = starts[1].failure()
    assert failure is not None
    assert (failure.who, failure.whole_node) == ("node 3", True)
    assert starts[0].failure() is None
    assert (groups.presence(0), groups.presence(1)) == ("there", "awaited")
    starts[1].end()
    agents[2].say("dropped 1 1")
    wait_for(starts[1].is_gone)
    call(3)
    wait_for(lambda: groups.presence(1) == "there")
    assert starts[1].failure() is not None, "the start that lost it is over"


def test_where_nobody_can_start_an_agent_again_a_lost_host_is_not_waited_for(groups, call, wait_for) -> None:
    groups._return_timeout_s = 0.0
    agents = [call(2), call(3)]
    wait_for(lambda: groups.presence(1) == "there")
    agents[1].close()
    wait_for(lambda: groups.presence(1) == "away")


def test_a_group_is_done_when_all_of_its_hosts_are(groups: NodesGroups, call, wait_for) -> None:
    agents = [call(0), call(1)]
    wait_for(lambda: groups.presence(0) == "there")
    start = groups.start(0, 1)
    agents[0].say("done 0 1")
    agents[1].say("done 0 1")
    wait_for(start.is_done)
    assert start.failure() is None
