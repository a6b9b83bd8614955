"""Which positions a rank holds, so that each weighs the same; and that attention over ranks is plain attention."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trainspec_cli.engine.models.attention import CausalCore
from trainspec_cli.engine.parallel import context
from trainspec_cli.engine.parallel.context import RingCore, UlyssesCore, held_positions


@pytest.mark.parametrize("method", ["ring", "ulysses"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_position_is_held_once(method, size):
    held = torch.cat([held_positions(32, method, rank, size) for rank in range(size)])
    assert torch.equal(held.sort().values, torch.arange(32))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_zigzag_gives_every_rank_as_much_of_the_causal_half(size):
    work = [int((held_positions(64, "ring", rank, size) + 1).sum()) for rank in range(size)]
    assert len(set(work)) == 1


class Ranks:
    """As many threads as ranks in one process, and what they exchange."""

    def __init__(self, size: int):
        self.size, self.barrier = size, threading.Barrier(size)
        self.sent: dict[int, torch.Tensor] = {}

    def swap(self, rank: int, sent: torch.Tensor) -> dict[int, torch.Tensor]:
        """What every rank has sent."""
        self.sent[rank] = sent.clone()
        self.barrier.wait(timeout=20)
        all_sent = dict(self.sent)
        self.barrier.wait(timeout=20)
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


class FakePassage:
    """To the next rank, from the one before."""

    def __init__(self, x: torch.Tensor, peers: FakePeers):
        self.received = peers.ranks.swap(peers.rank, x)[(peers.rank - 1) % peers.size]

    def arrive(self) -> torch.Tensor:
        return self.received


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: FakePeers) -> None:
    """The i-th part goes to rank i; parts lie along the first dimension."""
    everything = group.ranks.swap(group.rank, sent)
    received.copy_(torch.stack([everything[source][group.rank] for source in range(group.size)]))


def attention_and_gradients(core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Any:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = core(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_over_ranks_is_plain_attention(monkeypatch: pytest.MonkeyPatch, method: Any, size: int) -> None:
    """Output and the gradients of queries, keys and values, in fp64, of four heads that share two (or four) keys."""
    monkeypatch.setattr(context, "_Passage", FakePassage)
    monkeypatch.setattr(context.dist, "all_to_all_single", all_to_all)
    samples, seq, heads, keys = 2, 32, 4, 2 if method == "ring" else 4
    drawn = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(samples, seq, count, 8, generator=drawn, dtype=torch.float64)
        for count in (heads, keys, keys, heads)
    )
    whole = attention_and_gradients(CausalCore(), q, k, v, dout)
    ranks = Ranks(size)

    def of_rank(rank: int) -> list[torch.Tensor]:
        kind = RingCore if method == "ring" else UlyssesCore
        held = held_positions(seq, method, rank, size)
        mine = (x[:, held].contiguous() for x in (q, k, v, dout))
        return attention_and_gradients(kind(CausalCore(), FakePeers(ranks, rank)), *mine)  # type: ignore[arg-type]

    for rank, found in enumerate(ranks.run(of_rank)):
        held = held_positions(seq, method, rank, size)
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
            torch.testing.assert_close(ours, theirs[:, held], rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
