"""Rates of links from times that the test sets."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.engine.tools import links
from trainspec_cli.recipe.results.tools import AllReduceRate, LinksRequest, LinksResult, PairRate, PingRate

CPU = torch.device("cpu")


def world(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> list[tuple[Any, ...]]:
    """Stand-ins of torch.distributed; returns the calls, in order."""
    asked: list[tuple[Any, ...]] = []

    def all_reduce(values: torch.Tensor, how: str = "sum") -> None:
        asked.append(("all_reduce", values.nbytes, how))
        if how == "max":
            values.clamp_(min=2.0)

    dist = SimpleNamespace(
        get_rank=lambda: rank,
        get_world_size=lambda: size,
        all_reduce=all_reduce,
        barrier=lambda: asked.append(("barrier",)),
        send=lambda values, peer: asked.append(("send", values.nbytes, peer)),
        recv=lambda values, peer: asked.append(("recv", values.nbytes, peer)),
        ReduceOp=SimpleNamespace(MAX="max"),
    )
    monkeypatch.setattr(links, "dist", dist)
    return asked


def quickest(call: Callable[[], Any], device: torch.device, rounds: int) -> float:
    assert (device, rounds) == (CPU, 3)
    call()
    return 8.0


def test_an_all_reduces_rate_is_that_of_the_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks move each byte one and a half times."""
    asked = world(monkeypatch, 0, 4)
    monkeypatch.setattr(links, "quickest_s", quickest)
    sizes = (4096, 262144, 4194304)
    assert links.all_reduces(CPU) == [AllReduceRate(size, 8.0, size * 1.5 / 8.0) for size in sizes]
    assert asked == [("all_reduce", size, "sum") for size in sizes]


@pytest.mark.parametrize(
    ("rank", "order"),
    [(2, [("send", 4096, 6), ("recv", 4096, 6)]), (6, [("recv", 4096, 2), ("send", 4096, 2)]), (3, [])],
)
def test_a_message_goes_there_and_back_and_half_of_it_counts(
    monkeypatch: pytest.MonkeyPatch, rank: int, order: list[tuple[Any, ...]]
) -> None:
    asked = world(monkeypatch, rank, 8)
    monkeypatch.setattr(links, "quickest_s", quickest)
    seconds = 4.0 if order else 2.0
    assert links.ping(2, 6, 4096, CPU) == PingRate(4096, seconds, 4096 / seconds)
    assert asked == [*order, ("all_reduce", 8, "max")]


def pairs_of(monkeypatch: pytest.MonkeyPatch, size: int, per_node: int) -> tuple[list[PairRate], list[Any]]:
    asked = world(monkeypatch, 0, size)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    monkeypatch.setattr(links, "gather_json", lambda name, read: [f"node{rank // per_node}" for rank in range(size)])

    def ping(low: int, high: int, size: int, device: torch.device) -> PingRate:
        asked.append((low, high))
        return PingRate(size, 1.0, float(size))

    monkeypatch.setattr(links, "ping", ping)
    return links.pairs(CPU), asked


def test_every_pair_of_nodes_is_measured_by_its_first_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = pairs_of(monkeypatch, 6, 2)
    assert [one.hosts for one in found] == [("node0", "node1"), ("node0", "node2"), ("node1", "node2")]
    assert {one.bytes_per_s for one in found} == {4194304.0}, "the largest message's"
    assert [size.bytes for size in found[0].sizes] == [4096, 262144, 4194304]
    assert asked[:5] == [(0, 2), (0, 2), (0, 2), ("barrier",), (0, 4)]


@pytest.mark.parametrize(("nodes", "measured"), [(11, 55), (12, 11)])
def test_of_many_nodes_each_is_measured_with_the_next(
    monkeypatch: pytest.MonkeyPatch, nodes: int, measured: int
) -> None:
    found, _ = pairs_of(monkeypatch, 2 * nodes, 2)
    assert len(found) == measured
    chain = [(f"node{index}", f"node{index + 1}") for index in range(nodes - 1)]
    assert set(chain) <= {one.hosts for one in found}


def test_all_processes_and_then_each_pair_are_measured_on_the_asked_device(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(links, "join_processes", lambda kind: asked.append(kind) or CPU)
    monkeypatch.setattr(links, "all_reduces", lambda device: [AllReduceRate(1, 2.0, 0.5)] if device == CPU else [])
    monkeypatch.setattr(links, "pairs", lambda device: [PairRate(("a", "b"), 3.0, ())] if device == CPU else [])
    found = links.run(LinksRequest("cuda"))
    assert found == LinksResult((AllReduceRate(1, 2.0, 0.5),), (PairRate(("a", "b"), 3.0, ()),))
    assert asked == ["cuda"]
