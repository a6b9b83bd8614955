"""What is measured of a device."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainspec_cli.engine import digest
from trainspec_cli.engine.observe import counters as device

CPU = torch.device("cpu")


class Clock:
    """Stands in for `time`: a call takes what the test says."""

    def __init__(self, *calls_s: float):
        self.now_s, self._calls_s = 0.0, iter(calls_s)

    def perf_counter(self) -> float:
        return self.now_s

    def call(self) -> None:
        self.now_s += next(self._calls_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Clock]]:
    def make(*calls_s: float) -> Clock:
        made = Clock(*calls_s)
        monkeypatch.setattr(digest, "time", made)
        return made

    yield make  # type: ignore[misc]


def test_the_quickest_round_counts_and_the_first_call_does_not(clock: type[Clock]) -> None:
    time = clock(0.1, 3.0, 2.0, 5.0)
    assert device.quickest_s(time.call, CPU, rounds=3) == pytest.approx(2.0)


def test_a_round_lasts_for_its_time_and_is_the_mean_of_its_calls(clock: type[Clock]) -> None:
    """Rounds of 1 + 2 + 3 s, and of 4 + 1 s."""
    time = clock(0.1, 1.0, 2.0, 3.0, 4.0, 1.0)
    assert device.quickest_s(time.call, CPU, rounds=2, round_s=4.5) == pytest.approx(2.0)


def test_no_round_but_the_first_begins_after_the_limit(clock: type[Clock]) -> None:
    assert device.quickest_s(clock(9.0, 3.0, 2.0).call, CPU, rounds=9, limit_s=4.0) == pytest.approx(2.0)
    assert device.quickest_s(clock(9.0, 8.0).call, CPU, rounds=9, limit_s=4.0) == pytest.approx(8.0)


def test_a_matrix_product_of_n_takes_two_n_cubed_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "quickest_s", lambda call, where, rounds, round_s, limit_s: (call(), 0.5)[1])
    assert device.matmul_flops(CPU, torch.float32, 10, rounds=3, round_s=0.1) == 4000.0


@pytest.mark.parametrize(
    ("rates", "peak", "sizes"),
    [
        ({1024: 70e9, 2048: 50e9}, 70e9, [1024, 2048]),
        ({1024: 18e9, 2048: 20e9}, 20e9, [1024, 2048]),
        ({1024: 16e9}, 16e9, [1024]),  # the next would take more than a second
    ],
)
def test_the_peak_is_that_of_the_best_size(
    rates: dict[int, float], peak: float, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the first size tells which of a layer's products is the quickest."""
    asked: list[tuple[int, int, float, float, int]] = []

    def flops(_device: Any, _dtype: Any, size: int, *limits: Any) -> float:
        *limits, product = limits  # type: ignore[assignment]
        place = device.PRODUCTS.index(product)
        asked.append((size, *limits, place))
        return rates[size] if place == 1 else rates[size] / 10

    monkeypatch.setattr(device, "matmul_flops", flops)
    found = device.measure_peak(CPU, torch.bfloat16)
    assert found.flops == peak and "bfloat16 matmul measured" in found.source
    others = [(1024, 10, 0.02, 1.0, place) for place in (0, 1, 2)]
    assert asked == [*others, *((size, 10, 0.02, 1.0, 1) for size in sizes[1:])]


def test_the_products_of_a_layer_are_tried() -> None:
    a, b = torch.randn(3, 3), torch.randn(3, 3)
    for product, expected in zip(device.PRODUCTS, (a @ b, a @ b.T, a.T @ b), strict=True):
        assert torch.equal(product(a, b), expected)


def test_the_peak_of_memory_is_in_bytes() -> None:
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert kib * 1024 <= device.peak_memory_bytes(CPU) <= kib * 1024 * 2
    assert device.device_allocations(CPU) == 0


CHIPS = [torch.device(kind, 2) for kind in ("cuda", "xpu", "hpu")]


@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_a_chips_calls_are_awaited_before_a_round_and_after_each_of_them(
    chip: torch.device, clock: type[Clock], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    clock()
    marks = iter((1.0, 3.5))
    with monkeypatch.context() as patch:
        patch.setattr(device, "mark", lambda *, on_gpu: next(marks) if on_gpu else 0.0)
        patch.setattr(device, "wait_for", lambda moment: order.append(f"wait for {moment}"))
        assert device.quickest_s(lambda: order.append("call"), chip, rounds=1) == 2.5
    assert order == ["call", "wait for 1.0", "call", "wait for 3.5"]
    order.clear()
    device.quickest_s(lambda: order.append("call"), CPU, rounds=1)
    assert order == ["call", "call"]


@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_a_chip_is_asked_for_its_own_figures(chip: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    own_module = SimpleNamespace(get_device_name=lambda where: f"chip {where.index}")
    monkeypatch.setattr(torch, "get_device_module", lambda where: own_module)
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda where: {"num_device_alloc": 3 + where.index})
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda where: 100 + where.index)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda where: 500)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda where: 560)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda where: (40, 900))
    assert (device.device_allocations(chip), device.peak_memory_bytes(chip)) == (5, 102)
    assert device.free_bytes(chip) == 100, "the allocator's cache is free too"
    assert device.device_name(chip) == "chip 2"
    assert device.device_name(CPU) == device.cpu_name()
