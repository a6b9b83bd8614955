"""How gradients are looked at, timed and summed on their way to the other ranks, which are stand-ins here."""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from trainspec_cli.engine.parallel import data_parallel, gradient_sums
from trainspec_cli.engine.parallel.data_parallel import (
    DataParallel,
    _NothingToReduce,
    _sum_in_hooks,
    _TimedCollective,
    apply_data_parallel,
    exchange_in_backward,
    exchange_now,
)
from trainspec_cli.engine.parallel.noise import NoiseProbe
from trainspec_cli.engine.parallel.pipeline import WeightQueue

CPU = torch.device("cpu")


ALONE: Any = SimpleNamespace(size=1)


def how(*, offload: bool = False) -> DataParallel:
    peers: Any = SimpleNamespace(size=1, group=SimpleNamespace(size=lambda: 1))
    probe = NoiseProbe(CPU, ALONE, ALONE, ALONE)
    return DataParallel(
        *(torch.float32, torch.float32, True, offload, peers, lambda *_: nullcontext, nullcontext, probe),
        defaultdict(lambda: "own"),
    )


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


class Module:
    """Records the calls to FSDP2."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda value: self.told.append((name, value))


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(("shards", "replicas"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_hooks_sum_over_shards_then_over_replicas_and_look_before_the_first_sum(
    monkeypatch: pytest.MonkeyPatch, shards: int, replicas: int, compressed: bool
) -> None:
    done: list[str] = []

    def sum_up(name: str, factor: int) -> Any:
        def act(output: torch.Tensor, source: torch.Tensor | None = None, *_: Any, **__: Any) -> torch.Tensor:
            done.append(name)
            return output.copy_((output if source is None else source)[: len(output)] * factor)

        return act

    monkeypatch.setattr(data_parallel, "reduce_scatter", sum_up("scatter", shards))
    monkeypatch.setattr(gradient_sums, "all_reduce_", sum_up("reduce", replicas))
    over: Any = SimpleNamespace(
        reduce_scatter=lambda rows, wire: sum_up("scatter fewer bits", shards)(rows[0]),
        all_reduce_=lambda x, wire: sum_up("reduce fewer bits", replicas)(x),
    )
    peers: Any = SimpleNamespace(size=replicas, group=None, tiers=None, time=lambda *_: nullcontext())
    module: Any = Module()
    given = (over, over) if compressed else (None, None)
    _sum_in_hooks(module, shards, lambda *_: nullcontext(), peers, lambda x: done.append("look"), *given)  # type: ignore[arg-type, return-value]
    told = dict(module.told)
    gradients, own = torch.ones(4 * shards), torch.ones(4)
    if shards > 1:
        told["set_custom_reduce_scatter"](own, gradients, SimpleNamespace(size=lambda: shards))
    else:
        assert isinstance(told["set_custom_reduce_scatter"], _NothingToReduce)
    if hook := told.get("set_all_reduce_hook"):
        hook(own)
    assert own.tolist() == [shards * replicas] * 4
    bits = " fewer bits" if compressed else ""
    assert done == ["look", *["scatter" + bits] * (shards > 1), *["reduce" + bits] * (replicas > 1)]


def test_a_backward_that_exchanges_nothing_is_not_the_last() -> None:
    module: Any = Module()
    exchange_in_backward(module, True)
    exchange_in_backward(module, False)
    names = ("set_requires_gradient_sync", "set_is_last_backward")
    assert module.told == [(name, exchange) for exchange in (True, False) for name in names]


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


class ShardedError(Exception):
    """FSDP2 is not asked for more."""


@pytest.mark.parametrize(
    ("device", "offload", "policy"),
    [("cpu", True, CPUOffloadPolicy(False)), ("cuda", True, CPUOffloadPolicy(True)), ("xpu", False, OffloadPolicy())],
)
@pytest.mark.parametrize(("ranks", "odd", "dim"), [(1, 5, None), (2, 6, None), (2, 5, 1), (4, 6, 1), (3, 5, None)])
def test_experts_are_sharded_whole_where_they_divide_and_pinned_for_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    offload: bool,
    policy: OffloadPolicy,
    ranks: int,
    odd: int,
    dim: int | None,
) -> None:
    """Elsewhere by rows if these divide, all of a mixture's parameters alike."""
    asked: dict[str, Any] = {}

    def fully_shard(module: nn.Module, **options: Any) -> None:
        asked.update(options)
        raise ShardedError

    monkeypatch.setattr(data_parallel, "fully_shard", fully_shard)
    mesh: Any = SimpleNamespace(size=lambda: ranks, get_group=lambda: None, device_type=device)
    experts = nn.ParameterDict({"up": torch.zeros(6, 8, 4), "down": torch.zeros(odd, 4, 8)})
    with pytest.raises(ShardedError):
        apply_data_parallel(None, [experts], mesh, mesh, how(offload=offload))
    placement = asked["shard_placement_fn"]
    assert (placement and placement(None).dim) == dim
    assert asked["offload_policy"] == policy
    assert asked["reshard_after_forward"] == (ranks > 1)
