"""The agents of a run's nodes as Ray actors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from trainspec_cli.run.job.job import Job
from trainspec_cli.wings.ray import crew
from trainspec_cli.wings.ray.crew import Crew


class Cluster:
    """A cluster on which each call of the agent ends as the next of `endings` says."""

    def __init__(self, *endings: Callable[[], int]):
        self._endings = list(endings)
        self.calls = 0

    def remote(self, actor: type) -> SimpleNamespace:
        made = SimpleNamespace(serve=SimpleNamespace(remote=self._serve))
        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda: made))

    def _serve(self, root: str, generation: int, number: int) -> int:
        self.calls += 1
        return self.calls

    def wait(self, calls: list[int], timeout: float) -> tuple[list[int], list[int]]:
        return ([], calls) if calls[0] > len(self._endings) else (calls, [])

    def get(self, call: int) -> int:
        return self._endings[call - 1]()


@pytest.fixture
def open_crew(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Crew]:
    """Opens a start on one node. The tests look after the agents instead of a thread."""

    def make(cluster: Cluster) -> Crew:
        monkeypatch.setattr(crew, "ray", cluster)
        monkeypatch.setattr(crew, "RETRY_S", 0.0)
        monkeypatch.setattr(crew.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
        made = Crew([SimpleNamespace(options={})])  # type: ignore[list-item]
        return made.open(Job(Path("/run"), (), {}, 1, 1.0, Path("/run/logs"), nodes=(0,)), 1)

    return make


def look(opened: Crew, *machines: str) -> None:
    opened._attend("/run", 1, (set(machines), ["a"]))


def die() -> int:
    raise RayActorError


def test_a_call_that_reaches_a_dying_agent_is_made_again_and_no_node_is_lost(open_crew) -> None:
    cluster = Cluster(die, die)
    opened = open_crew(cluster)
    for _ in range(9):
        look(opened, "a")
    assert (cluster.calls, opened.take_losses()) == (3, [])


def test_a_machine_that_ray_finds_dead_is_lost(open_crew) -> None:
    opened = open_crew(Cluster())
    look(opened, "a")
    look(opened, "a")
    assert opened.take_losses() == []
    look(opened, "b")
    assert [number for number, _ in opened.take_losses()] == [0]


def test_a_machine_that_dies_is_lost_once_and_its_node_never_has_two_agents(open_crew) -> None:
    """Ray reports the machine before the call to it fails; the agent is started again after that, elsewhere."""
    fails: list[bool] = []
    cluster = Cluster(lambda: die() if fails else 0)
    cluster.wait = lambda calls, timeout: (calls, []) if fails and calls[0] == 1 else ([], calls)  # type: ignore[method-assign]
    opened = open_crew(cluster)
    look(opened, "a")
    for _ in range(3):
        look(opened, "b")
    assert ([number for number, _ in opened.take_losses()], cluster.calls) == ([0], 1)
    fails.append(True)
    for _ in range(3):
        opened._attend("/run", 1, ({"b"}, ["b"]))
    assert (opened.take_losses(), cluster.calls) == ([], 2)
