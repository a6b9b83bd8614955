"""Sums during the backward: the order of the exchanges, who waits for them, and what FSDP2 finds meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lab.waiting import PATIENCE_S
from torch import Tensor, nn

from trainspec_cli.engine.observe.clock import StepClock
from trainspec_cli.engine.parallel import gradient_sums
from trainspec_cli.engine.parallel.gradient_sums import GradientSums, ModuleSums, Route, Summand

CPU = torch.device("cpu")
SHARDS, REPLICAS = 2, 3


class Network:
    """Other ranks have the same gradients as this one, which keeps the first row. Each exchange waits for `gate`."""

    def __init__(self) -> None:
        self.exchanged: list[tuple[str, int]] = []
        self.timed: list[float | None] = []
        self.gate, self.error = threading.Event(), ""
        self.gate.set()
        self.threads = set[int]()

    def _pass(self, name: str, x: Tensor) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.error:
            raise RuntimeError(self.error)
        self.exchanged.append((name, x.numel()))
        self.threads.add(threading.get_ident())

    def reduce_scatter(self, own: Tensor, rows: Tensor, group: Any) -> None:
        self._pass("scatter", rows)
        own.copy_(rows[0] * SHARDS)

    def all_reduce_(self, x: Tensor, group: Any) -> None:
        self._pass("reduce", x)
        x.mul_(REPLICAS)

    @contextmanager
    def time(self, sends_bytes: float | None = None) -> Iterator[bool]:
        self.timed.append(sends_bytes)
        yield True

    def peers(self, size: int) -> Any:
        return SimpleNamespace(size=size, group=None, tiers=None, time=self.time)

    def route(self, *, shards: bool = True, replicas: bool = False) -> Route:
        return Route(self.peers(SHARDS) if shards else None, self.peers(REPLICAS) if replicas else None)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    network = Network()
    monkeypatch.setattr(gradient_sums, "reduce_scatter", network.reduce_scatter)
    monkeypatch.setattr(gradient_sums, "all_reduce_", network.all_reduce_)
    return network


@pytest.fixture
def sums() -> Iterator[GradientSums]:
    clock = StepClock(CPU)
    sums = GradientSums(clock.collective, clock.note_beside)
    sums.begin()
    yield sums
    sums.close()


def piece(route: Route, *values: float, compressed: Any = None) -> Summand:
    rows = torch.tensor([values] * route.rows)
    out = rows[0] if route.rows == 1 else torch.zeros(len(values))
    return Summand(route, rows, out, None, compressed, None)


def test_a_sum_goes_on_while_the_backward_does_and_is_waited_for_at_the_end(
    network: Network, sums: GradientSums
) -> None:
    first, second = piece(network.route(replicas=True), 1.0, 2.0), piece(network.route(), 4.0)
    network.gate.clear()
    for one in (first, second):
        sums.add(one)
    assert network.exchanged == []
    network.gate.set()
    sums.finish()
    assert first.sum_N.tolist() == [6.0, 12.0] and second.sum_N.tolist() == [8.0]
    assert network.exchanged == [("scatter", 4), ("reduce", 2), ("scatter", 2)]
    assert threading.get_ident() not in network.threads
    assert network.timed == [], "the timer of a link is the main thread's"
    assert sums.sizes_bytes == [16, 8]
    assert sums.waited_s > 0


@pytest.mark.parametrize(("bucket_bytes", "scattered"), [(0, [2, 4, 2]), (20, [6, 2]), (10**9, [8])])
def test_gradients_of_one_route_share_an_exchange_until_the_bucket_is_full(
    network: Network, sums: GradientSums, bucket_bytes: int, scattered: list[int]
) -> None:
    route, sums.bucket_bytes = network.route(replicas=True), bucket_bytes
    pieces = [piece(route, 1.0), piece(route, 2.0, 3.0), piece(route, 4.0)]
    for one in pieces:
        sums.add(one)
    sums.finish()
    assert [values for name, values in network.exchanged if name == "scatter"] == scattered
    assert [one.sum_N.tolist() for one in pieces] == [[6.0], [12.0, 18.0], [24.0]]


def test_other_routes_and_compressed_gradients_are_exchanged_by_themselves(
    network: Network, sums: GradientSums
) -> None:
    class Compressed:
        def reduce_scatter(self, rows: Tensor, wire: Any) -> Tensor:
            network._pass("compressed", rows)
            return rows[0] * 100

    route, sums.bucket_bytes = network.route(), 10**9
    pieces = [piece(route, 1.0), piece(route, 2.0), piece(route, 4.0, compressed=Compressed())]
    pieces += [piece(route, 5.0), piece(network.route(), 3.0)]
    for one in pieces:
        sums.add(one)
    sums.finish()
    assert network.exchanged == [("scatter", 4), ("compressed", 2), ("scatter", 2), ("scatter", 2)]
    assert [one.sum_N.item() for one in pieces] == [2.0, 4.0, 400.0, 10.0, 6.0]
    assert not sums.can_join


def test_a_step_that_shows_the_links_waits_for_each_exchange(network: Network, sums: GradientSums) -> None:
    sums.holds_back = True
    one = piece(network.route(replicas=True), 1.0, 2.0)
    sums.add(one)
    assert one.sum_N.tolist() == [6.0, 12.0]
    assert network.threads == {threading.get_ident()}
    assert network.timed == [16 / 2, 2 * 8 * 2 / 3]
    sums.finish()


def test_what_follows_a_sum_in_another_thread_waits_for_it(network: Network, sums: GradientSums) -> None:
    sums.await_added()()  # nothing was added
    network.gate.clear()
    one, seen = piece(network.route(), 1.0), list[float]()
    sums.bucket_bytes = 10**9
    sums.add(one)
    await_one = sums.await_added()
    other = threading.Thread(target=lambda: (await_one(), seen.append(one.sum_N.item())))  # type: ignore[func-returns-value]
    other.start()
    assert seen == []
    network.gate.set()
    sums.finish()
    other.join(PATIENCE_S)
    assert seen == [2.0]


def test_an_error_reaches_the_step_and_whoever_waits(network: Network, sums: GradientSums) -> None:
    network.error = "a peer is lost"
    sums.add(piece(network.route(), 1.0))
    with pytest.raises(RuntimeError, match="a peer is lost"):
        sums.await_added()()
    with pytest.raises(RuntimeError, match="a peer is lost"):
        sums.finish()


# As FSDP2 calls them


def backward(module: ModuleSums, parameter: nn.Parameter, gradient: Tensor, reduce: torch.dtype) -> None:
    """What FSDP2 does of a module's gradient, which its ranks of shards have in rows."""
    given = module.allocate((gradient.numel(),), dtype=reduce, device=CPU)
    given.copy_(gradient.flatten())
    output = module.allocate((parameter.numel(),), dtype=reduce, device=CPU)
    if gradient.numel() > parameter.numel():
        module(output_tensor=output, input_tensor=given, group=None, op=None)
    else:
        output.copy_(given)
    module.add(output)
    output = output.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = output.view_as(parameter)
    else:
        parameter.grad += output.view_as(parameter)


@pytest.mark.parametrize("reduce", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shards", [False, True])
def test_the_gradients_of_several_backwards_are_added_up(
    network: Network, sums: GradientSums, shards: bool, reduce: torch.dtype
) -> None:
    """Though the sum of none of them is there when FSDP2 would add to it."""
    parameter, looked = nn.Parameter(torch.zeros(2)), list[list[float]]()
    route = network.route(shards=shards, replicas=not shards)
    trained, look = (lambda: [parameter]), (lambda x: looked.append(x.flatten().tolist()))
    module = ModuleSums(sums, route, trained, look, None, None)
    for step in range(2):
        network.gate.clear()
        sums.begin()
        for value in (1.0, 10.0, 100.0):
            backward(module, parameter, torch.tensor([[value, 2 * value]] * route.rows), reduce)
        network.gate.set()
        sums.finish()
        factor = SHARDS if shards else REPLICAS
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32
        assert parameter.grad.tolist() == [111.0 * factor, 222.0 * factor], step
        parameter.grad = None
    assert looked[:2] == [[1.0, 2.0] * route.rows, [10.0, 20.0] * route.rows]


def test_gradients_that_were_not_cleared_are_no_earlier_sum_of_the_step(network: Network, sums: GradientSums) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    route = network.route(shards=False, replicas=True)
    module = ModuleSums(sums, route, lambda: [parameter], lambda x: None, None, None)
    backward(module, parameter, torch.ones(2), torch.float32)
    sums.finish()
    with pytest.raises(AssertionError, match="cleared"):
        backward(module, parameter, torch.ones(2), torch.float32)
