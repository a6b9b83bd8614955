"""Sums over replica groups: real gloo between threads, a device's own backend between processes, and how tensors are
put together for them."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lab.ranks import run_ranks
from lab.waiting import PATIENCE_S

from trainspec_cli.engine import cuda_only
from trainspec_cli.engine.comm.codec import GRADIENT_CODECS
from trainspec_cli.engine.comm.compressed import CompressedSum, Feedback
from trainspec_cli.engine.elastic import cross_group
from trainspec_cli.engine.elastic.cross_group import (
    LARGE_BYTES,
    CrossGroupComm,
    exchange_backend,
    packets,
    sum_as_one,
)

CPU = torch.device("cpu")
WORKER = Path(__file__).with_name("exchange_worker.py")


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """meet(act): what `act(comm)` returns in each of two groups, or the error that it raised."""
    store = dist.HashStore()
    monkeypatch.setattr(cross_group, "RendezvousStore", lambda _timeout: store)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def run(
        act: Callable[[CrossGroupComm], Any], timeout_s: float = PATIENCE_S, device: torch.device = CPU
    ) -> list[Any]:
        results: list[Any] = [None, None]

        def take_part(rank: int) -> None:
            try:
                results[rank] = act(CrossGroupComm("here", rank, 2, timeout_s, device))
            except RuntimeError as error:
                results[rank] = error

        threads = [threading.Thread(target=take_part, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
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

    error, _ = meet(act, timeout_s=4 * PATIENCE_S)
    assert isinstance(error, RuntimeError)


def test_a_peer_that_does_not_come_in_time_is_an_error(meet: Callable[..., list[Any]]) -> None:
    """It is still connected when the other gives up."""
    gave_up = threading.Event()

    def act(comm: CrossGroupComm) -> bool | None:
        if comm.rank == 1:
            return gave_up.wait(PATIENCE_S)
        try:
            comm.sum_(torch.ones(1))
        finally:
            gave_up.set()
        return None

    error, in_time = meet(act, timeout_s=0.5)
    assert isinstance(error, RuntimeError)
    assert in_time


# On a device


def test_the_backend_is_the_devices_own_and_gloo_where_torch_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert exchange_backend("cpu") == exchange_backend("mps") == "gloo"
    assert exchange_backend("hpu") == "gloo", "no plugin is here"
    for is_built, backend in ((True, "nccl"), (False, "gloo")):
        monkeypatch.setattr(dist, "is_backend_available", lambda name, is_built=is_built: is_built)
        assert exchange_backend("cuda") == backend


def run_on_device(way: str, ranks: int, folder: Path) -> list[Any]:
    """Return what each rank has seen of an exchange of a device's tensors; None for one that was killed."""
    ended = run_ranks(WORKER, [(way, rank, ranks, folder) for rank in range(ranks)])
    assert {rank.code for rank in ended} <= {0, -signal.SIGKILL}
    return [json.loads(rank.printed) if rank.code == 0 else None for rank in ended]


def test_the_devices_tensors_go_over_its_backend_and_the_hosts_over_gloo(tmp_path: Path) -> None:
    first, second = run_on_device("all", 2, tmp_path)
    for seen in (first, second):
        assert seen["sum"] == [10.0, 12.0, 14.0, 16.0, 18.0, 20.0]
        assert seen["parts"] == [[10.0, 12.0], [[10.0, 16.0], [12.0, 18.0], [14.0, 20.0]]]
        assert (seen["gathered"], seen["counts"], seen["digests"]) == ([[0, 0], [1, 0]], [2.0, 1.0], [0, 1])
        assert seen["calls for the host's"] == 0
    assert [seen["swapped"] for seen in (first, second)] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]
    wanted = torch.linspace(-1, 1, 300).mul(2).add(1)
    assert first["compressed"] == second["compressed"]
    assert float((torch.tensor(first["compressed"]) - wanted).norm() / wanted.norm()) < 0.02
    assert first["state"] == second["state"]
    kinds = {"allreduce": 2, "alltoall_base": 2, "allgather": 2}
    assert [seen["calls"] for seen in (first, second)] == [kinds | {"send": 2}, kinds | {"recv": 2}]


def test_a_peer_that_dies_while_the_devices_wait_for_it_is_an_error_at_once(tmp_path: Path) -> None:
    """The others abort what their devices have under way, and go on in a new process group."""
    *left, killed = run_on_device("die", 3, tmp_path)
    assert killed is None
    for seen in left:
        assert seen["error"] and seen["after_s"] < PATIENCE_S
        assert (seen["aborts"], seen["left"]) == ([1, 0], [2.0] * 4)
        assert seen["closed"], "what was aborted takes no more exchanges"


def test_a_device_whose_peer_never_comes_is_aborted_when_the_time_is_over(tmp_path: Path) -> None:
    for seen in run_on_device("stuck", 2, tmp_path):
        assert seen["error"] and seen["after_s"] >= 1.0
        assert seen["aborts"] == 1


def test_closing_ends_what_another_thread_waits_for_here_and_at_the_peers(tmp_path: Path) -> None:
    for seen in run_on_device("close", 2, tmp_path):
        assert seen["error"] and seen["after_s"] < PATIENCE_S
        assert seen["aborts"] == 1


def test_groups_that_share_a_device_exchange_through_the_host_and_say_so(tmp_path: Path) -> None:
    """NCCL refuses two ranks on one device."""
    for seen in run_on_device("share", 2, tmp_path):
        assert (seen["sum"], seen["groups"]) == ([2.0] * 4, 0)
        assert "share a device" in seen["why"]


def test_a_device_without_a_backend_is_staged_and_says_so(meet: Callable[..., list[Any]]) -> None:
    """The device is represented by its metadata only: no backend here carries its tensors."""
    device = torch.device("mps")
    for why, sum_ in meet(lambda comm: (comm.staged_because, comm.gather(torch.tensor([comm.rank]))), device=device):
        assert "mps" in why and [int(own) for own in sum_] == [0, 1]


def test_nccl_is_opened_so_that_a_lost_peer_does_not_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NCCL is here: this holds the variables that torch reads when a group is made, and that they are put back."""
    made: dict[str, Any] = {}

    class Group:
        @staticmethod
        def Options() -> Any:  # noqa: N802
            return SimpleNamespace(config=SimpleNamespace())

        def __init__(self, *given: Any):
            made.update(given=given, environment=dict(os.environ))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", raising=False)
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    store = dist.HashStore()
    cuda_only.open_nccl(store, 1, 2, timedelta(seconds=2.5))
    *place, options = made["given"]
    assert place == [store, 1, 2]
    assert (options._timeout, options.config.blocking) == (timedelta(seconds=5), 0)
    assert made["environment"].items() >= cuda_only.SURVIVABLE_NCCL.items()
    assert set(cuda_only.SURVIVABLE_NCCL.values()) == {"0"}
    assert made["environment"]["TORCH_NCCL_NONBLOCKING_TIMEOUT"] == "3"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    os.environ.pop("TORCH_NCCL_NONBLOCKING_TIMEOUT")


@pytest.mark.parametrize("extended", [False, True])
def test_a_vendors_backend_is_made_as_torch_makes_it(monkeypatch: pytest.MonkeyPatch, extended: bool) -> None:
    """torch keeps what plugins register in `Backend._plugins`, which has no public reader."""
    asked: list[Any] = []
    monkeypatch.setattr(dist.Backend, "default_device_backend_map", dict(dist.Backend.default_device_backend_map))
    monkeypatch.setattr(dist.Backend, "_plugins", dict(dist.Backend._plugins))
    dist.Backend.register_backend("vendors", lambda *given: asked.append(given), extended, ["hpu"])
    assert exchange_backend("hpu") == "vendors"
    comm: Any = SimpleNamespace(rank=1, size=2)
    store, timeout = dist.HashStore(), timedelta(seconds=5)
    CrossGroupComm._open_own(comm, "vendors", store, timeout, torch.device("hpu"))
    (given,) = asked
    if extended:
        options, of_backend = given
        given = (options.store, options.group_rank, options.group_size, options.timeout)
        assert of_backend is None and options.global_ranks_in_group == [0, 1]
    assert given[1:] == (1, 2, timeout)


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
