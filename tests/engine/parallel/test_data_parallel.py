"""How gradients are looked at, timed and summed on their way to the other ranks, which are stand-ins here."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from trainspec_cli.engine.parallel import data_parallel
from trainspec_cli.engine.parallel.data_parallel import (
    DataParallel,
    _NothingToReduce,
    _shardable_dim,
    _sum_over_replicas,
    _TimedCollective,
    apply_data_parallel,
    exchange_in_backward,
    exchange_now,
)
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import WeightQueue

CPU = torch.device("cpu")


ALONE: Any = SimpleNamespace(size=1)
COMPRESSED: Any = SimpleNamespace()


def how(replicas: int = 1, *, offload: bool = False) -> DataParallel:
    group = SimpleNamespace(size=lambda: replicas)
    peers: Any = SimpleNamespace(size=replicas, group=group)
    probe = NoiseProbe(CPU, ALONE, ALONE, ALONE)
    return DataParallel(
        torch.float32, torch.float32, True, offload, peers, lambda *_: nullcontext, probe, lambda name: "own"
    )


def test_gradients_are_looked_at_before_replicas_sum_them() -> None:
    gradient, seen = torch.tensor([3.0]), list[float]()
    replicas: Any = SimpleNamespace(size=2, sum_=lambda x: x.mul_(2))
    _sum_over_replicas(replicas, lambda x: seen.append(x.item()), None, gradient)
    assert (gradient.item(), seen) == (6.0, [3.0])
    _sum_over_replicas(ALONE, lambda x: seen.append(x.item()), None, gradient)
    assert (gradient.item(), seen) == (6.0, [3.0, 6.0]), "one replica alone sums nothing"
    _sum_over_replicas(replicas, None, None, gradient)
    assert gradient.item() == 12.0


def test_an_exchange_over_shards_is_timed_and_its_input_looked_at() -> None:
    order: list[Any] = []

    @contextmanager
    def time(sent_bytes: float | None = None) -> Any:
        order.append(sent_bytes)
        yield
        order.append("ends")

    group: Any = SimpleNamespace(size=lambda: 4)

    def collective(output: torch.Tensor, source: torch.Tensor, *, group: Any, async_op: bool) -> str:
        order.append((group, async_op))
        output.copy_(source * 2)
        return "its work"

    timed = _TimedCollective(collective, time, lambda x: order.append(x.tolist()))
    output = timed.allocate((2,), dtype=torch.bfloat16, device=CPU)
    assert (tuple(output.shape), output.dtype) == ((2,), torch.bfloat16)
    assert timed(output, torch.tensor([3.0, 4.0]), group, async_op=False) == "its work"
    assert order == [[3.0, 4.0], 4 * 3 / 4, (group, False), "ends"]
    assert output.tolist() == [6.0, 8.0]


def test_over_one_rank_input_and_output_are_one_buffer() -> None:
    nothing = _NothingToReduce()
    for size in (3, 5):
        given = nothing.allocate((size,), dtype=torch.float32, device=CPU)
        assert nothing.allocate((size,), dtype=torch.float32, device=CPU) is given
        assert tuple(given.shape) == (size,)
    with pytest.raises(AssertionError):
        nothing()


@pytest.mark.parametrize(("ranks", "dim"), [(1, 0), (2, 0), (4, 1), (3, 0)])
def test_experts_are_sharded_whole_where_they_divide_and_by_rows_elsewhere(ranks: int, dim: int) -> None:
    experts = nn.ParameterDict({"up": torch.zeros(6, 8, 4), "down": torch.zeros(6, 4, 8)})
    mesh: Any = SimpleNamespace(size=lambda: ranks)
    assert _shardable_dim(experts, mesh) == dim
    experts["odd"] = torch.zeros(5, 2, 2)
    assert _shardable_dim(experts, mesh) == (0 if ranks == 1 else 1), "all of a mixture's parameters alike"


class Module:
    """Notes what FSDP2 is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.append((name, value))


@pytest.mark.parametrize(("shards", "replicas", "probed"), [(1, 1, True), (2, 1, None), (1, 2, True), (2, 2, False)])
def test_gradients_are_sums_and_are_looked_at_once(shards: int, replicas: int, probed: bool | None) -> None:
    """Where shards are summed first, their exchange does."""
    module, given = Module(), how(replicas)

    def look(gradients: torch.Tensor) -> None:
        raise AssertionError("nothing is reduced here")

    data_parallel._sum_gradients(module, SimpleNamespace(size=lambda: shards), given, look, COMPRESSED)  # type: ignore[arg-type]
    told = dict(module.told)
    sums = {"set_gradient_divide_factor": 1.0, "set_force_sum_reduction_for_comms": True}
    assert {name: value for name, value in told.items() if name in sums} == (sums if shards > 1 else {})
    hook = told.get("set_all_reduce_hook")
    assert (hook is None) == (probed is None)
    if hook is not None:
        assert hook.func is _sum_over_replicas
        assert hook.args == (given.replicas, look if probed else None, COMPRESSED)


def test_a_backward_that_exchanges_nothing_is_not_the_last() -> None:
    module = Module()
    for exchange in (True, False):
        data_parallel.exchange_in_backward(module, exchange)  # type: ignore[arg-type]
    assert module.told == [
        ("set_requires_gradient_sync", True),
        ("set_is_last_backward", True),
        ("set_requires_gradient_sync", False),
        ("set_is_last_backward", False),
    ]


class Stage(nn.Sequential):
    def block_modules(self) -> list[nn.Module]:
        return [self[1]]


def gradients_of_a_bf16_step(*, split: bool) -> list[torch.Tensor]:
    """Two micro-batches' gradients, exchanged in fp32. `split`: the weights' gradients come after the backwards."""
    torch.manual_seed(0)
    stage, queue = Stage(nn.LayerNorm(6), nn.Linear(6, 5), nn.Linear(5, 4)), WeightQueue()
    queue.apply(stage)
    formats = replace(how(), compute=torch.bfloat16)
    apply_data_parallel(stage, [], init_device_mesh("cpu", (1,)), None, formats)
    for number in range(2):
        exchange_in_backward(stage, not split and number == 1)  # type: ignore[arg-type]
        if split:
            queue.hold(0, number)
        stage(torch.randn(3, 6)).square().sum().backward()
        queue.stop_holding()
    if split:
        for number in range(2):
            queue.work_off(0, number)
        exchange_now(stage)  # type: ignore[arg-type]
    return [parameter.grad.full_tensor() for parameter in stage.parameters()]  # type: ignore[union-attr]


@pytest.mark.usefixtures("one_process")
def test_gradients_that_come_after_their_backward_are_exchanged_with_the_others() -> None:
    """Norms and biases have theirs from the backward, in fp32 already; those of the weights are still bf16, and their
    sum over the micro-batches is rounded to it."""
    plain, split = gradients_of_a_bf16_step(split=False), gradients_of_a_bf16_step(split=True)
    assert all(gradient.dtype == torch.float32 and gradient.any() for gradient in split)
    torch.testing.assert_close(split, plain, rtol=torch.finfo(torch.bfloat16).eps, atol=0)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", False), ("cuda", True), ("xpu", True)])
def test_offloaded_shards_are_pinned_for_a_gpu(device: str, pinned: bool) -> None:
    policy = how(offload=True).offload_policy(device)
    assert isinstance(policy, CPUOffloadPolicy) and policy.pin_memory is pinned
    assert type(how().offload_policy(device)) is OffloadPolicy
