"""Messages between neighbours of a pipeline: ranks as threads, whose lines have a delay each."""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from trainspec_cli.engine.digest import elapsed_s
from trainspec_cli.engine.parallel import pipeline as line_times
from trainspec_cli.engine.parallel.pipeline import Lines, neighbours, time_messages
from trainspec_cli.recipe.keys.layout import Layout

MESSAGE = torch.zeros(3, 5)


class Network:
    """A message is there `delays_s[sender, receiver]` after it was sent; receipts are there immediately."""

    def __init__(self) -> None:
        self.delays_s: dict[tuple[int, int], float] = {}
        self.sent: defaultdict[tuple[str, int, int], queue.Queue[int]] = defaultdict(queue.Queue)
        self.lock = threading.Lock()
        self.local = threading.local()

    def line(self, *key: Any) -> queue.Queue[int]:
        with self.lock:
            return self.sent[key]

    def send(self, tensor: torch.Tensor, group: str, group_dst: int) -> None:
        own = self.local.rank
        assert group == ("up" if group_dst > own else "down"), "each way has a group of its own"
        if tensor.numel() > 1:
            time.sleep(self.delays_s.get((own, group_dst), 0.0))
        self.line(group, own, group_dst).put(tensor.numel())

    def recv(self, tensor: torch.Tensor, group: str, group_src: int) -> None:
        assert group == ("up" if group_src < self.local.rank else "down")
        assert self.line(group, group_src, self.local.rank).get(timeout=600) == tensor.numel()

    def times(self, layout: Layout) -> list[tuple[float, float]]:
        def of_rank(rank: int) -> tuple[float, float]:
            self.local.rank = rank
            up, down = Named("up", rank), Named("down", rank)
            lines = Lines(up, down, torch.device("cpu"))  # type: ignore[arg-type]
            ahead, back = (0.0 if span is None else elapsed_s(*span) for span in time_messages(layout, lines, MESSAGE))
            return ahead, back

        with ThreadPoolExecutor(layout.pp) as pool:
            return list(pool.map(of_rank, range(layout.pp)))


class Named(str):
    """A process group that is known by its name, and knows this thread's rank."""

    own: int

    def __new__(cls, name: str, rank: int) -> Named:
        named = super().__new__(cls, name)
        named.own = rank
        return named

    def rank(self) -> int:
        return self.own


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(line_times, "dist", network)
    return network


def test_neighbours_are_timed_in_turns_and_round_where_stages_go_round() -> None:
    assert neighbours(Layout(pp=2)) == [(0, 1)]
    assert neighbours(Layout(pp=4)) == [(0, 1), (2, 3), (1, 2)]
    interleaved = Layout(pp=4, pipeline_schedule="interleaved", virtual_stages=2)
    assert neighbours(interleaved) == [(0, 1), (2, 3), (1, 2), (3, 0)]
    assert neighbours(Layout(pp=4, pipeline_schedule="zbv")) == [(0, 1), (2, 3), (1, 2)]
    assert neighbours(Layout(pp=2, pipeline_schedule="interleaved", virtual_stages=2)) == [(0, 1)]


def test_each_way_of_each_line_shows_its_own_delay(network: Network) -> None:
    """Ranks that wait for a neighbour who is still busy with another are not slow."""
    network.delays_s = {(1, 2): 0.3, (3, 2): 0.6}
    ahead, back = zip(*network.times(Layout(pp=4)), strict=True)
    assert 0.3 <= ahead[1] < 0.6 <= back[3]
    others = [*ahead[:1], *ahead[2:3], *back[1:3]]
    assert all(0 < seconds < 0.3 for seconds in others)
    assert (ahead[3], back[0]) == (0.0, 0.0), "the ends have one neighbour"


def test_interleaved_stages_go_round(network: Network) -> None:
    network.delays_s = {(2, 0): 0.2}
    times = network.times(Layout(pp=3, pipeline_schedule="interleaved", virtual_stages=2))
    assert times[2][0] >= 0.2
    assert all(seconds > 0 for both in times for seconds in both)
