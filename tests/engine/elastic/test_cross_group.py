"""Sums over replica groups: real gloo between threads, and how tensors are put together for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback
from trainspec_cli.engine.elastic import cross_group
from trainspec_cli.engine.elastic.cross_group import LARGE_BYTES, CrossGroupComm, packets, sum_as_one


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """meet(act): what `act(comm)` returns in each of two groups, or the error that it raised."""
    store = dist.HashStore()
    monkeypatch.setattr(cross_group, "RendezvousStore", lambda _timeout: store)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(act: Callable[[CrossGroupComm], Any], timeout_s: float = 20.0) -> list[Any]:
        results: list[Any] = [None, None]

        def take_part(rank: int) -> None:
            try:
                results[rank] = act(CrossGroupComm("here", rank, 2, timeout_s))
            except RuntimeError as error:
                results[rank] = error

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return results

    return run


def test_sums_and_gathers_are_over_all_groups(meet: Callable[..., list[Any]]) -> None:
    def act(comm: CrossGroupComm) -> Any:
        own = torch.tensor([1.0, 10.0]) * (comm.rank + 1)
        gathered = comm.gather(own)
        comm.sum_(own)
        return own.tolist(), [tensor.tolist() for tensor in gathered]

    assert meet(act) == [([3.0, 30.0], [[1.0, 10.0], [2.0, 20.0]])] * 2


def test_compressed_sums_are_the_same_in_all_groups(meet: Callable[..., list[Any]]) -> None:
    own = [torch.randn(1000, generator=torch.Generator().manual_seed(group)) for group in range(2)]

    def act(comm: CrossGroupComm) -> Any:
        summed = own[comm.rank].clone()
        CompressedSum(GRADIENT_CODECS["int8"], Feedback(1000, torch.device("cpu"))).all_reduce_(summed, comm)
        return summed

    first, second = meet(act)
    assert torch.equal(first, second)
    assert float((first - sum(own)).norm() / sum(own).norm()) < 0.02  # type: ignore[union-attr]


def test_the_state_is_copied_in_place_bit_for_bit(meet: Callable[..., list[Any]]) -> None:
    sent = [torch.randn(3, 4).t(), torch.tensor([7]), torch.randn(5).bfloat16()]

    def act(comm: CrossGroupComm) -> Any:
        if comm.rank == 0:
            return comm.send(sent, 1)
        received = [torch.zeros_like(tensor) for tensor in sent]
        comm.receive_(received, 0)
        return received

    _, received = meet(act)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(received, sent, strict=True))


def test_a_peer_that_leaves_is_an_error_at_once(meet: Callable[..., list[Any]]) -> None:
    def act(comm: CrossGroupComm) -> None:
        if comm.rank == 0:
            comm.sum_(torch.ones(1))

    began = time.monotonic()
    error, _ = meet(act, timeout_s=50.0)
    assert isinstance(error, RuntimeError)
    assert time.monotonic() - began < 25


def test_a_peer_that_does_not_come_in_time_is_an_error(meet: Callable[..., list[Any]]) -> None:
    """It is still connected when the other gives up."""
    gave_up = threading.Event()

    def act(comm: CrossGroupComm) -> bool | None:
        if comm.rank == 1:
            return gave_up.wait(20)
        try:
            comm.sum_(torch.ones(1))
        finally:
            gave_up.set()
        return None

    error, in_time = meet(act, timeout_s=0.5)
    assert isinstance(error, RuntimeError)
    assert in_time


# Packets


def of_bytes(size_bytes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size_bytes // dtype.itemsize, dtype=dtype)


def test_large_tensors_go_alone_and_small_ones_of_a_type_together() -> None:
    large, transposed = of_bytes(LARGE_BYTES), of_bytes(LARGE_BYTES).view(2, -1).t()
    small = [of_bytes(LARGE_BYTES // 2 - 4) for _ in range(4)]
    half = of_bytes(100, torch.bfloat16)
    made = list(packets([small[0], large, half, small[1], transposed, small[2], small[3]]))
    assert made == [[1], [0, 3, 4], [2], [5, 6]]


def test_no_tensors_make_no_packets() -> None:
    assert list(packets([])) == []


def test_every_tensor_is_summed_in_its_own_place_and_type() -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(3), torch.randn(4, 2).t(), torch.randn(5)]
    wanted = [2 * tensor for tensor in tensors]
    calls: list[int] = []

    def double(tensor: torch.Tensor) -> None:
        calls.append(tensor.numel())
        tensor.mul_(2)

    sum_as_one(tensors, double)
    sum_as_one(tensors[:1], double)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(tensors[1:], wanted[1:], strict=True))
    assert torch.equal(tensors[0], 2 * wanted[0]) and calls == [16, 3]


def test_counts_travel_with_the_loss_in_its_type() -> None:
    loss, counts = torch.tensor(0.5), torch.tensor([3, 4])
    sum_as_one([loss, counts], lambda flat: flat.mul_(3))
    assert (loss.item(), counts.tolist(), counts.dtype) == (1.5, [9, 12], torch.int64)
