"""Collectives of activations in two ranks, forward and backward, and the processes' way into a group."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine.parallel.ranks import Ranks

from trainspec_cli.engine.comm import exchange, joining
from trainspec_cli.engine.comm.exchange import Peers, Tiers, enter_region, leave_region


class Timed:
    def __init__(self) -> None:
        self.sent_bytes: list[float | None] = []

    def __call__(self, sent_bytes: float | None = None) -> Any:
        self.sent_bytes.append(sent_bytes)
        return nullcontext(False)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Peers:
    """The second of two ranks; the first holds 100 more everywhere."""

    def gather(whole: torch.Tensor, mine: torch.Tensor, group: Any, async_op: bool) -> Any:
        assert mine.is_contiguous()
        assert async_op
        return SimpleNamespace(wait=lambda: whole.copy_(torch.cat((mine + 100, mine))))

    def scatter(mine: torch.Tensor, whole: torch.Tensor, group: Any) -> Any:
        assert whole.is_contiguous()
        return lambda: mine.copy_((2 * whole + 100)[len(mine) :])

    def reduce(x: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Any:
        def wait() -> None:
            x.copy_(2 * x + 100 if op == dist.ReduceOp.SUM else x + 100)

        return SimpleNamespace(wait=wait) if async_op else wait()

    monkeypatch.setattr(exchange, "all_gather", gather)
    monkeypatch.setattr(exchange, "start_reduce_scatter", scatter)
    monkeypatch.setattr(exchange.dist, "all_reduce", reduce)
    return Peers(SimpleNamespace(size=lambda: 2, rank=lambda: 1), Timed())  # type: ignore[arg-type]


def both_passes(function: Any, x: torch.Tensor, peers: Peers, parallel: bool, dy: torch.Tensor) -> tuple[Any, Any]:
    x = x.clone().requires_grad_()
    out = function(x, peers, parallel)[0]
    out.backward(dy.expand_as(out).clone())
    return out.detach(), x.grad


X = torch.arange(12.0).view(2, 3, 2)
ONE = torch.ones(())


def test_a_region_sees_the_whole_sequence_and_returns_a_part_of_the_sum(peers: Peers) -> None:
    whole, dx = both_passes(enter_region, X, peers, True, ONE)
    assert torch.equal(whole, torch.cat((X + 100, X), dim=1))
    assert whole.is_contiguous()
    assert torch.equal(dx, torch.full_like(X, 102.0)), "the ranks' gradients are summed, and a part is returned"
    wide = torch.arange(16.0).view(2, 4, 2)
    part, dx = both_passes(leave_region, wide, peers, True, ONE)
    assert torch.equal(part, 2 * wide[:, 2:] + 100)
    assert torch.equal(dx, torch.cat((torch.full((2, 2, 2), 101.0), torch.ones(2, 2, 2)), dim=1))
    gathered, scattered = 2 * 6 * 2 * 4 / 2, 2 * 4 * 2 * 4 / 2  # of the whole a rank sends one half, in fp32
    # The end of an exchange of the backward pass is timed separately.
    expected = [gathered, gathered, None, scattered, scattered, None]
    assert peers.time.sent_bytes == expected  # type: ignore[attr-defined]


def test_without_cut_sequences_one_direction_sums_and_the_other_passes_on(peers: Peers) -> None:
    gradient = torch.ones(())
    same, dx = both_passes(enter_region, X, peers, False, gradient)
    assert torch.equal(same, X)
    assert torch.equal(dx, torch.full_like(X, 102.0))
    kept = X.clone()
    summed, dx = both_passes(leave_region, kept, peers, False, gradient)
    assert torch.equal(summed, 2 * X + 100)
    assert torch.equal(kept, X), "the input is not written over"
    assert torch.equal(dx, torch.ones_like(X))
    # One of two ranks sends as many bytes as the tensor has.
    assert peers.time.sent_bytes == [X.nbytes, None, X.nbytes]  # type: ignore[attr-defined]


def test_sums_and_maxima_are_in_place_and_timed(peers: Peers) -> None:
    x = torch.tensor([1.0, 2.0])
    assert peers.sum_(x) is x
    assert x.tolist() == [102.0, 104.0]
    assert peers.maximum_(x) is x
    assert x.tolist() == [202.0, 204.0]
    assert (peers.size, peers.rank) == (2, 1)
    assert peers.time.sent_bytes == [8.0, None], "a maximum is a message next to nothing"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("device_type", "device", "backend"),
    [("cpu", "cpu", "gloo"), ("cuda", "cuda:3", "cpu:gloo,cuda:nccl"), ("xpu", "xpu:3", "cpu:gloo,xpu:xccl")],
)
def test_a_rank_joins_with_its_own_device(
    device_type: str, device: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    chosen: list[Any] = []
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "_stores", [])
    monkeypatch.setattr(joining, "_open_store", lambda world_size: f"store of {world_size}")
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
    monkeypatch.setattr(joining.dist, "init_process_group", lambda name, **more: given.update(more, backend=name))
    assert joining.join_processes(device_type) == torch.device(device)
    assert given.pop("timeout").total_seconds() == 1800
    assert given == {"backend": backend, "store": "store of 8", "rank": 5, "world_size": 8}
    assert chosen == ([torch.device(device)] if device_type != "cpu" else [])
    assert joining._stores == ["store of 8"], "a process group holds only the C++ half"


class Member:
    """One of a group of ranks that are threads."""

    def __init__(self, ranks: Ranks, rank: int):
        self.ranks, self.rank = ranks, rank

    def size(self) -> int:
        return self.ranks.size

    def swap(self, sent: torch.Tensor) -> list[torch.Tensor]:
        return [*self.ranks.swap(self.rank, sent).values()]


def summed_in_tiers(given: list[torch.Tensor], sizes: tuple[int, ...]) -> list[torch.Tensor]:
    """Return what each rank holds after a sum over levels of these sizes, innermost first."""
    groups: dict[tuple[int, int, int], Ranks] = {}

    def of_rank(rank: int) -> list[torch.Tensor]:
        members, stride = [], 1
        for level, size in enumerate(sizes):
            ranks = groups.setdefault((level, rank // (stride * size), rank % stride), Ranks(size))
            members.append(Member(ranks, rank // stride % size))
            stride *= size
        whole: Any = SimpleNamespace(size=lambda: len(given))
        timed, summed = Timed(), given[rank].clone()
        assert Peers(whole, timed, Tiers(tuple(members))).sum_(summed) is summed  # type: ignore[arg-type]
        below = [math.prod(sizes[:level]) for level in range(len(sizes))]
        parts = sum((size - 1) / size / inside for size, inside in zip(sizes, below, strict=True))
        assert timed.sent_bytes == [pytest.approx(2 * summed.nbytes * parts)]
        return [summed]

    return [summed for (summed,) in Ranks(len(given)).run(of_rank)]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (2, 2, 2)])
@pytest.mark.parametrize("shape", [(12,), (7,), (1,), (3, 5)])
def test_a_sum_in_tiers_is_made_inside_them_first(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    """Also of values that do not divide by the ranks of an element. All ranks have the same bits, those of the sums of
    elements that are added up."""

    def swap(received_RB: torch.Tensor, sent_RB: torch.Tensor, group: Member) -> Any:
        received_RB.copy_(torch.stack([theirs[group.rank] for theirs in group.swap(sent_RB)]))
        return lambda: None

    monkeypatch.setattr(exchange, "is_on_gloo", lambda group: True)
    monkeypatch.setattr(exchange, "start_swap", swap)
    generator = torch.Generator().manual_seed(math.prod(sizes))
    given = [torch.randn(shape, generator=generator) for _ in range(math.prod(sizes))]
    wanted = given
    for size in sizes:
        wanted = [torch.stack(wanted[first : first + size]).sum(0) for first in range(0, len(wanted), size)]
    assert all(torch.equal(found, wanted[0]) for found in summed_in_tiers(given, sizes))
