"""Ranks as threads of one process: what they exchange is handed over in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch


class Ranks:
    """One thread per rank in one process, and their exchanges."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size)
        self.sent: dict[int, Any] = {}

    def swap(self, rank: int, sent: Any) -> dict[int, Any]:
        """Return what every rank has sent, by rank."""
        self.sent[rank] = sent.detach().clone() if isinstance(sent, torch.Tensor) else sent
        self.barrier.wait(timeout=600)
        all_sent = {rank: self.sent[rank] for rank in range(self.size)}
        self.barrier.wait(timeout=600)
        return all_sent

    def run(self, of_rank: Callable[[int], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(of_rank, range(self.size)))


@dataclass
class FakePeers:
    ranks: Ranks
    rank: int
    time: Any = nullcontext

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def group(self) -> FakePeers:
        return self

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack([*self.ranks.swap(self.rank, x).values()]).sum(0))

    def maximum_(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(torch.stack([*self.ranks.swap(self.rank, x).values()]).amax(0))


def all_to_all(
    received: torch.Tensor,
    sent: torch.Tensor,
    came: list[int] | None = None,
    parts: list[int] | None = None,
    *,
    group: FakePeers,
) -> None:
    """The i-th part of what a rank sends goes to rank i; parts lie along the first dimension, equal if not given."""
    even = [len(sent) // group.size] * group.size
    everything = group.ranks.swap(group.rank, (sent.detach().clone(), parts or even))
    pieces = [everything[source][0].split(everything[source][1])[group.rank] for source in range(group.size)]
    assert [len(piece) for piece in pieces] == (came or even)
    received.copy_(torch.cat(pieces))
