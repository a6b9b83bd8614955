"""Which positions a rank holds, so that each weighs the same; and that attention over ranks is plain attention."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.parallel.ranks import FakePeers, Ranks, all_to_all

from trainspec_cli.engine.models.attention import CausalCore
from trainspec_cli.engine.parallel import context
from trainspec_cli.engine.parallel.context import RingCore, UlyssesCore, held_positions


@pytest.mark.parametrize(
    ("method", "held"),
    [
        ("ulysses", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),
        ("ring", [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]),
    ],
)
def test_every_position_is_held_once_and_a_zigzag_gives_as_much_of_the_causal_half(method: Any, held: Any) -> None:
    assert [held_positions(12, method, rank, 3).tolist() for rank in range(3)] == held


class FakePassage:
    """To the next rank, from the one before."""

    def __init__(self, x: torch.Tensor, peers: FakePeers):
        self.received = peers.ranks.swap(peers.rank, x)[(peers.rank - 1) % peers.size]

    def arrive(self) -> torch.Tensor:
        return self.received


def attention_and_gradients(core: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor) -> Any:
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = core(*inputs)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_attention_over_ranks_is_plain_attention(
    monkeypatch: pytest.MonkeyPatch, method: Any, size: int, scale: float | None
) -> None:
    """Output and the gradients of queries, keys and values, in fp64, of four heads that share two (or four) keys."""
    monkeypatch.setattr(context, "_Passage", FakePassage)
    monkeypatch.setattr(context.dist, "all_to_all_single", all_to_all)
    samples, seq, heads, keys = 2, 32, 4, 2 if method == "ring" else 4
    drawn = torch.Generator().manual_seed(0)
    q, k, v, dout = (
        torch.randn(samples, seq, count, 8, generator=drawn, dtype=torch.float64)
        for count in (heads, keys, keys, heads)
    )
    whole = attention_and_gradients(CausalCore(scale=scale), q, k, v, dout)
    ranks = Ranks(size)

    def of_rank(rank: int) -> list[torch.Tensor]:
        kind = RingCore if method == "ring" else UlyssesCore
        held = held_positions(seq, method, rank, size)
        mine = (x[:, held].contiguous() for x in (q, k, v, dout))
        return attention_and_gradients(kind(CausalCore(scale=scale), FakePeers(ranks, rank)), *mine)  # type: ignore[arg-type]

    for rank, found in enumerate(ranks.run(of_rank)):
        held = held_positions(seq, method, rank, size)
        for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
            torch.testing.assert_close(ours, theirs[:, held], rtol=1e-11, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_a_ring_sends_to_the_next_rank_and_receives_from_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers are named by their numbers among all ranks; the ring of ranks 3, 5 and 9 closes."""
    asked: list[tuple[str, int]] = []
    waited: list[int] = []
    dist = SimpleNamespace(
        get_process_group_ranks=lambda group: [3, 5, 9],
        isend="isend",
        irecv="irecv",
        P2POp=lambda move, tensor, peer, group: (move, tensor, peer, group),
    )

    def start(moves: list[Any]) -> list[Any]:
        for move, tensor, peer, group in moves:
            assert group == "the ring"
            asked.append((move, peer))
            if move == "irecv":
                tensor.fill_(7.0)
        return [SimpleNamespace(wait=lambda: waited.append(1)) for _ in moves]

    dist.batch_isend_irecv = start
    monkeypatch.setattr(context, "dist", dist)
    arrived = []
    for rank in range(3):
        peers = SimpleNamespace(group="the ring", rank=rank, size=3, time=nullcontext)
        sent = torch.full((2,), 1.0)
        arrived.append(context._Passage(sent, peers).arrive())  # type: ignore[arg-type]
        assert sent.tolist() == [1.0, 1.0]
    assert asked == [("isend", 5), ("irecv", 9), ("isend", 9), ("irecv", 3), ("isend", 3), ("irecv", 5)]
    assert len(waited) == 6
    assert all(tensor.tolist() == [7.0, 7.0] for tensor in arrived)
